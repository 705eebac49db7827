"""Groups in a training process: creates them, registers layers on them, and ends them.

Users have a `Group`; behind it this process has a `HeldGroup`:

    who            does                                                    with
    make_group     spec and mesh of what a caller says                     meshes, specs
    forming        claims ranks, maps windows, reports: once per group     daemon, native library
    formed         keeps descriptors, gives them to a restarted daemon     the daemon
    registrations  layers by name; new ones to daemon and native library   both
    health         whether calls go on, and which error ends them          the board, the daemon
    load_and_skew  counters of the ranks as arrays                         readers of the commands

A step uses none of these modules: compiled programs hold names and ids, and the native library has
all other data.
The first error wins. But if a call itself reports the end of the group, its error is kept, because
it names op and layer, which neither board nor daemon knows.
"""
