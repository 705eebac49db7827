"""Calls the native library for arrays it supports; holds the loops over rows that ops share."""
