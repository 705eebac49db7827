"""Calls the native library if it supports the arrays; holds the row loops that ops share."""
