"""A cluster in one thread, on a clock of its own: daemons' real objects, processes, links.

A schedule is a seed, what every process does, and what befalls daemons and links. The same one
gives the same run: messages take the times that the seed says, and time passes when nothing is
left to do at a moment.
"""
