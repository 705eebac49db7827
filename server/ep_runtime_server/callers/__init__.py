"""Who calls: users by the kernel's word, their sessions, and how much each may take."""
