"""Groups in a training process: made, used by layers, ended.

A `Group` is what users hold, a `HeldGroup` what this process holds behind it:

    who            does                                                    with
    make_group     spec and mesh of what a caller says                     meshes, specs
    forming        claims ranks, maps windows, reports: once per group     daemon, native library
    formed         keeps descriptors, gives them to a restarted daemon     the daemon
    registrations  layers by name; new ones to daemon and native library   both
    health         whether calls go on, and which error ends them          the board, the daemon
    load_and_skew  counters of the ranks as arrays                         readers of the commands

A step touches none of it: compiled programs know names and ids, and the native library the rest.
The first error wins. A call's own error about the group's end is kept, because it names op and
layer, which neither board nor daemon knows.
"""
