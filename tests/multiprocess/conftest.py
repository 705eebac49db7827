"""A network between two hosts."""

from cluster_nets import net  # noqa: F401 - fixtures are found by name
