"""A cluster in one thread on simulated time: daemons' real objects, processes, links.

A schedule is a seed, what every process does, and what befalls daemons and links. The seed says how
long messages take; time passes when nothing is left to do: the same schedule gives the same run.
"""
