"""Callers: users as the kernel reports them, their sessions and quotas."""
