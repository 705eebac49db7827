"""Groups that form across nodes: claims, views, and who tells whom."""
