"""The table of `doses`: data alone."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Held:
    """A test that holds a promise.

    Attributes:
        test: FILE::TEST below tests/.
        ci, full: how often its fault comes, in CI and by command; a test of `full` 0 runs whole,
            and one of `ci` 0 is left out of CI (it is marked slow, or needs GPUs).
        unit: what is counted.
    """

    test: str
    ci: int = 0
    full: int = 0
    unit: str = ""


@dataclasses.dataclass(frozen=True)
class Promise:
    """What happens, and what is promised then."""

    number: int
    fault: str
    promise: str
    held_by: tuple[Held, ...]


def _fuzzers(*items: tuple[str, int]) -> tuple[Held, ...]:
    """A million inputs in all."""
    return tuple(Held(f"faults/test_fuzzed_{test}", ci, 120_000, "inputs") for test, ci in items)


_MEMORY = "server/test_daemon_memory.py::"
_SESSIONS = "server/test_daemon_sessions.py::"
_LIMITS = "faults/test_real_limits.py::"
_LINKS = "server/test_lossy_links.py::"
_SPANNING = "server/test_spanning_faults.py::"

TABLE = (
    Promise(
        1,
        "SIGKILL of a client at every step of the protocol",
        "sessions, memory and descriptors are free within 2 s; the next client gets all there is",
        (
            Held(
                f"{_MEMORY}test_a_client_killed_at_any_step_leaves_nothing_after_two_seconds",
                *(2, 200, "kills at each of 12 steps"),
            ),
            Held(
                f"{_MEMORY}test_kills_at_one_step_after_the_other_leak_nothing", 12, 2400, "kills"
            ),
            Held(
                "e2e/test_kills.py::test_kills_of_the_client_library_leak_nothing", 0, 200, "kills"
            ),
        ),
    ),
    Promise(
        2,
        "SIGKILL of the daemon wherever it changes something, and while it recovers",
        "the same handles, ids and memory; no slot twice; clients go on; a torn journal is read",
        (
            Held("faults/test_daemon_kills.py::test_a_kill_at_a_change_costs_nothing"),
            Held("faults/test_daemon_kills.py::test_a_kill_while_it_recovers_costs_nothing"),
            Held(
                "faults/test_daemon_kills.py::test_many_kills_at_changes_cost_nothing",
                *(0, 1000, "lives with a kill"),
            ),
            Held("faults/test_daemon_kills.py::test_kills_in_a_row_leak_nothing", 5, 100, "kills"),
            Held("faults/test_repeated.py::test_torn_journals", 2, 100, "tears"),
            Held(
                "faults/test_daemon_restart.py"
                "::test_many_killed_daemons_cost_no_step_and_leak_nothing",
                *(0, 100, "kills under a training job"),
            ),
        ),
    ),
    Promise(
        3,
        "a quarter of all requests is lost, and a quarter of all answers",
        "who asks again ends up where he would have been; an op id gets the answer of before",
        (
            Held(
                "faults/test_lost_calls.py::test_who_asks_again_ends_up_where_he_would_have_been",
                *(300, 10_000, "operations"),
            ),
            Held(
                "faults/test_lost_calls.py::test_the_client_library_asks_again",
                *(2, 20, "lives of a session"),
            ),
        ),
    ),
    Promise(
        4,
        "operations of groups and windows in any order",
        "no rank has two owners, no memory is freed under a process, none leaks",
        (Held("server/test_group_model.py::test_random_lives_of_groups_keep_the_rules"),),
    ),
    Promise(
        5,
        "a forked child keeps the sockets of a process that is killed",
        "the death is known within 100 ms; the child cannot use session or ticket",
        (
            Held(
                f"{_SESSIONS}test_a_forked_child_that_keeps_the_sockets_does_not_hide_the_death",
                *(3, 100, "kills"),
            ),
            Held(f"{_SESSIONS}test_a_token_in_a_forked_child_is_refused_by_its_pid"),
            Held(f"{_SESSIONS}test_a_connection_that_a_forked_child_uses_is_refused"),
            Held(f"{_SESSIONS}test_another_process_cannot_redeem_a_ticket"),
        ),
    ),
    Promise(
        6,
        "SIGSTOP for half a minute, then SIGCONT",
        "SUSPECT within 15 s; nothing is given away; who was fenced meanwhile is told so",
        (
            Held(
                f"{_SESSIONS}"
                "test_stopped_processes_are_suspect_and_those_that_were_fenced_are_told",
                *(4, 50, "processes"),
            ),
            Held("faults/test_repeated.py::test_stopped_processes_and_restarts", 2, 50, "stops"),
            Held(
                "faults/test_recovery.py::test_a_stopped_process_finds_its_memory_when_it_goes_on"
            ),
        ),
    ),
    Promise(
        7,
        "thousands of descriptors handed out, thousands of sessions",
        "the daemon's descriptors are as many as before, its memory does not grow",
        (
            Held(f"{_MEMORY}test_handing_out_descriptors_costs_none", 300, 10_000, "exports"),
            Held(
                "faults/test_coming_and_going.py::test_sessions_that_come_and_go_leave_nothing",
                *(100, 100_000, "sessions"),
            ),
        ),
    ),
    Promise(
        8,
        "no file descriptors left, in the daemon or in a client",
        "an error that says so, no spinning, and service within 2 s once there are some",
        (
            Held(f"{_MEMORY}test_without_descriptors_the_daemon_refuses_and_recovers"),
            Held(f"{_MEMORY}test_a_listener_without_descriptors_pauses_instead_of_spinning"),
            Held("server/test_open_files.py::test_who_opens_all_he_may_takes_nothing_from_others"),
            Held(f"{_LIMITS}test_a_client_without_descriptors_says_so_and_keeps_none"),
        ),
    ),
    Promise(
        9,
        "any bytes, packets, descriptors, calls and board fields",
        "an answer of ours or a close; nothing fails in the daemon; memory and descriptors stay",
        (
            *_fuzzers(
                ("packets.py::test_any_packets_are_answered", 1_000),
                ("bytes.py::test_any_frames_on_api_sock_are_survived", 2_500),
                ("bytes.py::test_any_frames_of_a_node_with_a_certificate_are_survived", 1_000),
                ("bytes.py::test_any_bytes_instead_of_a_handshake_are_survived", 1_000),
                ("calls.py::test_any_calls_of_a_session_are_answered", 1_000),
                ("calls.py::test_any_calls_without_a_token_are_answered", 500),
                ("calls.py::test_any_orders_are_answered", 750),
                ("calls.py::test_any_calls_of_who_has_the_clusters_secret_are_answered", 500),
                ("calls.py::test_any_calls_of_a_node_with_a_certificate_are_answered", 500),
            ),
            Held(
                "faults/test_board_fields.py::test_any_values_in_any_fields_are_read",
                *(10_000, 1_000_000, "boards"),
            ),
            Held(
                "server/test_odd_journal.py::test_a_daemon_starts_on_any_journal_of_whole_records",
                *(40, 4000, "journals"),
            ),
        ),
    ),
    Promise(
        10,
        "connections that say nothing, or a byte a second, or read no answers",
        "others are served as before; the connections are gone within 20 s",
        (
            Held(
                "server/test_slow_callers.py::test_callers_who_say_little_delay_nobody",
                *(200, 5000, "connections"),
            ),
            Held(f"{_MEMORY}test_idle_connections_are_dropped"),
            Held(f"{_MEMORY}test_connections_are_bounded"),
            Held(
                "server/test_daemon_wire.py"
                "::test_a_client_that_reads_no_answers_loses_its_connection"
            ),
            Held(
                "server/test_daemon_wire.py"
                "::test_connections_to_api_sock_that_say_nothing_are_dropped"
            ),
        ),
    ),
    Promise(
        11,
        "a stranger, another process's token or ticket, an order on api.sock",
        "refused and told in the events; a token belongs to one process",
        (
            Held(f"{_SESSIONS}TestForeignUsers::test_are_refused_by_default"),
            Held(f"{_SESSIONS}test_a_ticket_works_once_for_its_session_and_for_ten_seconds"),
            Held("server/test_api_sock.py::test_a_token_is_worth_nothing_to_another_user"),
            Held("server/test_api_sock.py::test_an_order_needs_admin_sock_whoever_gives_it"),
            Held("faults/test_two_users.py::test_a_user_reaches_nothing_of_another"),
        ),
    ),
    Promise(
        12,
        "a client or a daemon of another version",
        "works, or names both versions",
        (
            Held(f"{_SESSIONS}test_a_client_of_another_protocol_is_told_both_versions"),
            Held("server/test_daemon_wire.py::test_an_unknown_method_is_version_skew"),
            Held(
                "server/test_nodes.py"
                "::test_versions_that_do_not_fit_name_node_field_and_both_values"
            ),
            Held("server/test_nodes.py::test_a_bugfix_release_and_more_protocols_fit"),
        ),
    ),
    Promise(
        13,
        "the wall clock jumps by an hour and by a year, both ways, of the daemon or of a client",
        "no lease ends and none lasts longer; ages and waits stay; a restart finds everything",
        (
            Held("faults/test_clock_jumps.py::test_nothing_ends_and_nothing_lasts_longer"),
            Held(
                "faults/test_clock_jumps.py"
                "::test_a_daemon_that_starts_again_in_another_year_has_everything"
            ),
            Held(
                "faults/test_clock_jumps.py"
                "::test_waits_and_deadlines_of_a_client_are_what_they_were"
            ),
        ),
    ),
    Promise(
        14,
        "memory, disk or /run are full, or files may not grow",
        "the error says what is full; running jobs go on; it heals; nothing is half registered",
        (
            Held(f"{_MEMORY}test_an_exhausted_pool_names_asked_free_limit_and_holders"),
            Held(f"{_MEMORY}test_a_failed_allocation_holds_nothing"),
            Held(
                "faults/test_full_disk.py"
                "::test_a_disk_that_is_full_from_the_restart_on_disturbs_no_job"
            ),
            Held("faults/test_repeated.py::test_full_disks", 2, 50, "full disks"),
            Held(f"{_LIMITS}test_more_than_the_cgroup_has_is_refused_and_kills_nobody"),
            Held(f"{_LIMITS}test_a_full_run_refuses_what_is_new_and_heals"),
            Held(f"{_LIMITS}test_files_that_may_not_grow_refuse_what_is_new_and_heal"),
        ),
    ),
    Promise(
        15,
        "ten thousand layers, lists of a full board",
        "ten thousand registrations in 5 s; no request holds the loop for 100 ms",
        (
            Held("server/test_daemon_layers.py::test_ten_thousand_layers_take_less_than_a_second"),
            Held("server/test_loop_holds.py::test_a_request_is_answered_in_short_turns"),
            Held("server/test_loop_holds.py::test_lists_of_a_full_board_come_in_short_turns"),
        ),
    ),
    Promise(
        16,
        "a second daemon on a directory; sockets of a killed one",
        "the second ends with a code other than 0; the first goes on; a new one starts",
        (
            Held(
                "server/test_daemon_process.py"
                "::test_a_second_daemon_on_the_directory_ends_and_harms_nothing"
            ),
            Held(
                "server/test_daemon_process.py"
                "::test_sockets_of_a_killed_daemon_do_not_stop_the_next"
            ),
        ),
    ),
    Promise(
        17,
        "a daemon is drained and replaced under a job",
        "no error that a retry does not mend; no byte of memory lost",
        (
            Held(
                "faults/test_recovery.py"
                "::test_a_daemon_that_is_replaced_in_good_order_costs_no_more_than_a_kill",
                *(2, 50, "replacements"),
            ),
        ),
    ),
    Promise(
        18,
        "the coordinator, nodes and processes die while a group forms over nodes; links between "
        "nodes lose, delay, or carry one way alone",
        "never two views of one epoch; whoever is left forms the group",
        (
            Held(
                f"{_SPANNING}test_no_epoch_has_two_views_whatever_dies_while_a_group_forms",
                *(0, 100, "rounds of each of 5 seeds"),
            ),
            Held(f"{_SPANNING}test_a_coordinator_that_dies_while_a_group_forms_is_waited_for"),
            Held(
                f"{_SPANNING}test_a_process_that_dies_while_nobody_knows_the_decision_is_not_forgotten"
            ),
            Held(f"{_SPANNING}test_a_coordinator_that_hangs_is_as_good_as_away_until_it_goes_on"),
            Held("server/test_partition.py::test_a_partition_ends_no_group_and_lets_none_form"),
            Held(
                "server/test_partition.py"
                "::test_a_partition_while_a_group_forms_leaves_nobody_with_half_of_it"
            ),
            Held(f"{_LINKS}test_groups_form_and_deaths_are_told_over_a_bad_link"),
            Held(f"{_LINKS}test_a_link_that_carries_one_way_alone_ends_no_group_and_splits_none"),
            Held(f"{_LINKS}test_a_node_that_starts_again_behind_a_cut_takes_its_place"),
        ),
    ),
    Promise(
        19,
        "a process is killed while its kernel writes to a window in GPU memory",
        "nothing is written any more when the memory is another's",
        (
            Held(
                "gpu/test_gpu_owners.py"
                "::test_a_kernel_of_a_killed_process_writes_nothing_once_the_memory_is_another_s",
                *(2, 200, "kills, on GPUs"),
            ),
        ),
    ),
    Promise(
        20,
        "the daemon that made GPU memory is killed, then the process that keeps it",
        "a third one reads what was there; the GPU has it back within 30 s of the last close",
        (
            Held(
                "gpu/test_gpu_owners.py"
                "::test_memory_outlives_the_daemon_that_made_it_and_goes_back_to_the_gpu",
                *(2, 100, "kills, on GPUs"),
            ),
        ),
    ),
    Promise(
        21,
        "a process of a training job is killed or fenced in the middle of a step, or its group "
        "reclaimed",
        "all that live know what happened and by whom, end, and saved no NaN; the job forms again, "
        "unless reclaimed on the same memory",
        (
            Held(
                "faults/test_kills_in_steps.py"
                "::test_a_kill_in_a_step_ends_the_others_with_its_name_and_saves_no_nan",
                *(2, 200, "kills"),
            ),
            Held(
                "faults/test_kills_in_steps.py::test_an_order_in_a_step_ends_all_with_who_gave_it",
                *(2, 40, "reclaims and as many fences, half of them after a drain"),
            ),
            Held(
                "gpu/test_gpu_kills.py"
                "::test_a_kill_in_a_step_over_windows_ends_the_others_with_its_name_and_saves_no_nan",
                *(0, 50, "kills in each of 4 jobs, on GPUs"),
            ),
            Held(
                "gpu/test_gpu_kills.py"
                "::test_a_kill_in_a_step_of_two_domains_ends_the_others_with_its_name_and_saves_no_nan",
                *(0, 50, "kills in each of 4 jobs, on GPUs"),
            ),
            Held(
                "faults/test_peer_loss.py"
                "::test_a_survivor_forms_the_group_anew_with_whoever_takes_the_dead_ones_place",
                *(2, 50, "losses"),
            ),
            Held(
                "faults/test_peer_loss.py::test_many_lost_processes_leak_nothing", 0, 50, "losses"
            ),
            Held(
                "faults/test_elastic_plans.py::test_ranks_come_back_in_place",
                *(1, 40, "turns of each of 10 plans"),
            ),
            Held("faults/test_repeated.py::test_killed_peers_that_come_back", 2, 50, "kills"),
            Held(
                "faults/test_late_ranks.py::test_ranks_that_time_out_again_and_again_leave_nothing",
                *(2, 50, "timeouts"),
            ),
            Held(
                "e2e/test_steps.py"
                "::test_groups_replaced_and_reclaimed_again_and_again_leave_nothing",
                *(2, 50, "times twice"),
            ),
        ),
    ),
    Promise(
        22,
        "an allocation stands still beside the event loop, or the loop itself does",
        "heartbeats and health go on; the loop's lag is in status and metrics; no session ends",
        (
            Held(
                "server/test_stalls.py::test_an_allocation_that_stands_still_delays_nobody_else",
                *(1, 5, "seconds"),
            ),
            Held(
                "server/test_stalls.py::test_a_loop_that_stands_still_is_seen_and_ends_no_session",
                *(1, 5, "seconds"),
            ),
        ),
    ),
    Promise(
        23,
        "calls between daemons come late, out of order, or are lost on either way, while processes "
        "and daemons come and go (daemons' objects in one thread, on a clock of their own)",
        "every wait ends in time with the right error; one view of an epoch; ends are told within "
        "2 s, another spec within 1 s; nothing is left",
        (
            Held(
                "server/test_schedules.py::test_any_schedule_keeps_what_is_promised",
                *(60, 100_000, "schedules"),
            ),
        ),
    ),
)
