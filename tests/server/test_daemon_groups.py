"""Groups form once for all their processes, and end when their processes end."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import doc_pages
import pytest
from harness import eventually
from raw_client import WAIT_S, close_fds, make_spec, new_op_id
from raw_jobs import attached_pair

from ep_runtime import board, errors, layer_specs
from ep_runtime.v1 import group_service_pb2, types_pb2

READY = types_pb2.GROUP_STATE_READY
FORMING = types_pb2.GROUP_STATE_FORMING


def test_one_process_forms_a_group_and_maps_it(daemon):
    client, spec = daemon.client(), make_spec()
    created = client.create(spec)
    assert (created.group.state, created.reattached) == (FORMING, False)
    found = client.fetch(created.group)
    assert [d.world_rank for d, _ in found] == [-1, 0, 1]
    sizes = [board.board_bytes(spec)] + [board.window_bytes(spec)] * 2
    assert [d.bytes for d, _ in found] == [os.fstat(fd).st_size for _, fd in found] == sizes
    close_fds(found)
    assert client.attached(created.group).state == READY
    assert daemon.used_bytes == sum(sizes)
    assert client.close_group(created.group) == sum(sizes)
    eventually(lambda: daemon.used_bytes == 0)
    assert daemon.group_states() == {}


def test_some_windows_can_be_fetched_alone(daemon):
    client = daemon.client()
    group = client.create(make_spec(ranks=4)).group
    found = client.fetch(group, ranks=[2, 1])
    assert [d.world_rank for d, _ in found] == [-1, 2, 1]
    close_fds(found)
    with pytest.raises(errors.InvalidArgumentError, match="of .0, 1, 2, 3., .* got .4."):
        client.ticket(group, ranks=[4])
    with pytest.raises(errors.InvalidArgumentError, match="must be distinct"):
        client.ticket(group, ranks=[1, 2, 1])


def test_more_windows_than_one_packet_carries(daemon):
    client = daemon.client()
    group = client.create(make_spec(ranks=100, hidden_size=1)).group
    found = client.fetch(group)
    assert [d.world_rank for d, _ in found] == list(range(-1, 100))
    close_fds(found)


def test_the_same_call_again_returns_the_same_group(daemon):
    client, spec = daemon.client(), make_spec()
    ready = client.ready(spec)
    again = client.create(spec).group
    assert (again.generation, again.state) == (ready.generation, READY)
    assert client.attached(again).state == READY
    with pytest.raises(errors.InvalidArgumentError, match="claims the ranks"):
        client.create(spec, [0])


def test_an_op_id_runs_once_and_serves_one_request(daemon):
    client, op_id = daemon.client(), new_op_id()
    first = client.create(make_spec(), op_id=op_id)
    second = client.create(make_spec(), op_id=op_id)
    assert first == second
    with pytest.raises(errors.InvalidArgumentError, match="used for another"):
        client.create(make_spec("other"), op_id=op_id)
    with pytest.raises(errors.InvalidArgumentError, match="op_id must be 1 to 64 bytes"):
        client.create(make_spec(), op_id="x" * 65)


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("num_experts", 16, "num_experts=16 in this one"),
        ("retain_s", 5.0, "retain_s=5.0 in this one"),
        ("mesh_axes", (("dp", 1), ("ep", 2)), "mesh_axes="),
    ],
)
def test_another_spec_is_a_mismatch_with_both_values(daemon, field, value, shown):
    first, second = daemon.client(), daemon.client()
    first.create(make_spec())
    with pytest.raises(errors.SpecMismatchError, match=shown) as caught:
        second.create(make_spec(**{field: value}))
    assert caught.value.fields["field"] == field
    assert set(caught.value.fields) == {"object", "field", "theirs", "ours"}


def test_replace_takes_the_place_of_another_spec(daemon):
    client = daemon.client()
    old = client.ready(make_spec())
    replaced = client.create(make_spec(num_experts=16), replace=True).group
    assert replaced.generation > old.generation
    # A living process still maps the old windows.
    assert daemon.status().pools[0].quarantined_bytes > 0
    client.close_group(old)
    eventually(lambda: daemon.status().pools[0].quarantined_bytes == 0)
    assert client.create(make_spec(num_experts=16), replace=True).group == replaced


def test_a_rank_of_a_live_process_is_busy(daemon):
    first, second = daemon.client(process=True), daemon.client()
    first.ready(make_spec())
    with pytest.raises(errors.GroupBusyError) as caught:
        second.create(make_spec(), [1])
    assert (caught.value.fields["rank"], caught.value.fields["pid"]) == (1, first.pid)
    doc_pages.check_said("busy", str(caught.value))


def test_names_live_inside_a_job(daemon):
    first, second = daemon.client(), daemon.client(job="other")
    one, two = first.create(make_spec()).group, second.create(make_spec(num_experts=16)).group
    assert one.generation != two.generation
    assert len(daemon.ask("ListGroups").groups) == 2


def test_two_processes_form_one_group(daemon):
    group = attached_pair([daemon.client(process=True), daemon.client(process=True)], make_spec())
    (info,) = daemon.ask("ListGroups", name="moe").groups
    assert info.group.state == READY
    assert [(m.world_rank, m.attached) for m in info.group.members] == [(0, True), (1, True)]
    assert len({m.pid for m in info.group.members}) == 2
    assert info.group.generation == group.generation


def test_missing_ranks_are_named_at_the_deadline_and_the_claim_is_given_up(daemon):
    client = daemon.client()
    with pytest.raises(errors.GroupNotReadyError, match=r"ranks \[0, 2\] of 3") as caught:
        client.create(make_spec(ranks=3, num_experts=6), [1], wait_s=0.05)
    assert caught.value.fields["missing_ranks"] == [0, 2]
    doc_pages.check_said("missing", str(caught.value))
    assert daemon.group_states() == {}
    eventually(lambda: daemon.used_bytes == 0)


def test_members_that_do_not_attach_are_named(daemon):
    client, other = daemon.client(), daemon.client()
    spec = make_spec()
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(c.create, spec, [rank]) for rank, c in enumerate((client, other))]
        group = made[0].result(WAIT_S).group
        made[1].result(WAIT_S)
    with pytest.raises(errors.InvalidArgumentError, match="fetch the windows"):
        client.attached(group)
    close_fds(client.fetch(group))
    with pytest.raises(errors.GroupNotReadyError, match=r"ranks \[1\]"):
        client.attached(group, wait_s=0.05)


def claimed_ranks(daemon) -> list[int]:
    return [m.world_rank for g in daemon.ask("ListGroups").groups for m in g.group.members if m.pid]


def test_a_claimant_that_dies_before_forming_frees_its_ranks(daemon):
    spec = make_spec(ranks=3, num_experts=6)
    dying, client, other = daemon.client(process=True), daemon.client(), daemon.client()
    with ThreadPoolExecutor(3) as pool:
        lost = pool.submit(dying.create, spec, [1])
        first = pool.submit(client.create, spec, [0])
        eventually(lambda: claimed_ranks(daemon) == [0, 1])
        dying.process.kill()
        eventually(lambda: claimed_ranks(daemon) == [0])
        assert daemon.group_states() == {"moe": "FORMING"}
        second = pool.submit(other.create, spec, [1, 2])
        assert second.result(WAIT_S).group.generation == first.result(WAIT_S).group.generation
        with pytest.raises(errors.SessionFencedError):
            lost.result(WAIT_S)


def test_a_peer_that_dies_breaks_the_group_poisons_it_and_can_be_replaced(daemon):
    spec = make_spec(retain_s=60.0)
    first, second = daemon.client(process=True), daemon.client(process=True)
    old = attached_pair([first, second], spec)
    second.process.kill()
    eventually(lambda: daemon.group_states() == {"moe": "BROKEN"})
    (info,) = daemon.ask("ListGroups").groups
    assert info.poison_reason == "PEER_LOST"
    with pytest.raises(errors.PeerLostError, match="rank 1"):
        first.attached(old)
    third = daemon.client(process=True)
    with pytest.raises(errors.GroupBusyError):  # the survivor is alive and has not claimed again
        third.create(spec, [0], wait_s=0.05)
    assert daemon.group_states() == {"moe": "BROKEN"}
    used = daemon.used_bytes
    group = attached_pair([first, third], spec)
    assert group.generation > old.generation
    assert daemon.used_bytes == used
    (info,) = daemon.ask("ListGroups").groups
    assert info.poison_reason == ""


def test_a_survivor_keeps_its_rank_while_others_form_again(daemon):
    spec = make_spec(ranks=3, num_experts=6)
    clients = [daemon.client(process=True) for _ in range(5)]
    with ThreadPoolExecutor(5) as pool:
        made = [pool.submit(c.create, spec, [rank]) for rank, c in enumerate(clients[:3])]
        old = [m.result(WAIT_S).group for m in made][0]
        clients[2].process.kill()
        eventually(lambda: daemon.group_states() == {"moe": "BROKEN"})
        newcomer = pool.submit(clients[3].create, spec, [2])
        eventually(lambda: claimed_ranks(daemon) == [2])
        with pytest.raises(errors.GroupBusyError) as caught:  # it is alive, and may come back
            clients[4].create(spec, [0], wait_s=0.05)
        assert caught.value.fields["pid"] == clients[0].pid
        clients[1].close_group(old)
        again = [
            pool.submit(clients[0].create, spec, [0]),
            pool.submit(clients[4].create, spec, [1]),
        ]
        generations = {f.result(WAIT_S).group.generation for f in (newcomer, *again)}
    assert len(generations) == 1
    assert generations.pop() > old.generation


def test_who_waits_for_attachment_hears_of_a_death(daemon):
    spec = make_spec()
    first, second = daemon.client(), daemon.client(process=True)
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(c.create, spec, [rank]) for rank, c in enumerate((first, second))]
        group = [m.result(WAIT_S).group for m in made][0]
        close_fds(first.fetch(group))
        waiting = pool.submit(first.attached, group)
        second.process.kill()
        with pytest.raises(errors.PeerLostError, match="rank 1"):
            waiting.result(2.0)


def test_a_member_that_closes_in_good_order_does_not_disturb_the_others(daemon):
    first, second = daemon.client(process=True), daemon.client(process=True)
    group = attached_pair([first, second], make_spec(retain_s=60.0))
    assert first.close_group(group) == 0
    assert daemon.group_states() == {"moe": "READY"}
    (info,) = daemon.ask("ListGroups").groups
    assert info.poison_reason == ""
    assert second.close_group(group) > 0
    assert daemon.group_states() == {}


def test_a_claimant_that_is_fenced_poisons_nothing_of_the_generation_before(daemon):
    first, second = daemon.client(process=True), daemon.client(process=True)
    spec = make_spec()
    first.close_group(attached_pair([first, second], spec))
    newcomer = daemon.client()
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(newcomer.create, spec, [0])
        eventually(lambda: claimed_ranks(daemon) == [0])
        daemon.ask("Fence", session_id=newcomer.session_id)
        with pytest.raises(errors.SessionFencedError):
            refused.result(WAIT_S)
    # A process that did not claim again may still be inside the last call.
    assert second.process.do("board")[1] == 0


class TestRetention:
    def test_a_restarted_job_gets_the_same_memory_without_allocating(self, clocked):
        spec = make_spec(retain_s=60.0)
        first = clocked.client(process=True)
        group = first.create(spec).group
        inodes = [row[3] for row in first.fetch(group)]
        first.process.do("map")
        first.attached(group)
        layers, stacks = first.register(group, [layer_specs.LayerSpec("a", top_k=1)])
        used = clocked.used_bytes
        first.process.kill()
        eventually(lambda: clocked.group_states() == {"moe": "RETAINED"})
        assert clocked.status().pools[0].retained_bytes == used
        clocked.advance(59)

        second = clocked.client(process=True)
        again = second.create(spec)
        assert again.reattached
        assert again.group.generation > group.generation
        assert [row[3] for row in second.fetch(again.group)] == inodes
        second.attached(again.group)
        assert clocked.used_bytes == used
        ((layer,), _) = second.register(again.group, [layer_specs.LayerSpec("a", top_k=1)])
        assert layer.already_registered
        assert (layer.base_id, layer.handle_base) == (layers[0].base_id, layers[0].handle_base)
        clocked.advance(1000)  # the retained time ended with the claim
        assert clocked.group_states() == {"moe": "READY"}
        assert "windows.freed" not in clocked.event_kinds()

    def test_ends_after_its_time(self, clocked):
        client = clocked.client(process=True)
        client.ready(make_spec(retain_s=60.0))
        client.process.kill()
        eventually(lambda: clocked.group_states() == {"moe": "RETAINED"})
        clocked.advance(59.875)
        (info,) = clocked.ask("ListGroups").groups
        assert info.group.retained_left.ToMilliseconds() == 125
        clocked.clock.advance(0.125)
        eventually(lambda: clocked.group_states() == {})
        eventually(lambda: clocked.used_bytes == 0)

    def test_for_no_time_is_none(self, clocked):
        client = clocked.client(process=True)
        client.ready(make_spec(retain_s=0.0))
        client.process.kill()
        eventually(lambda: clocked.group_states() == {})
        assert "group.retained" not in clocked.event_kinds()

    def test_is_not_for_another_job_or_spec(self, clocked):
        client = clocked.client(process=True)
        old = client.ready(make_spec(retain_s=60.0))
        client.process.kill()
        eventually(lambda: clocked.group_states() == {"moe": "RETAINED"})
        other = clocked.client(job="other").create(make_spec(retain_s=60.0))
        assert not other.reattached
        with pytest.raises(errors.SpecMismatchError):
            clocked.client().create(make_spec(retain_s=60.0, num_experts=16))
        replaced = clocked.client().create(make_spec(retain_s=60.0, num_experts=16), replace=True)
        assert not replaced.reattached
        assert replaced.group.generation > old.generation

    def test_close_frees_at_once(self, clocked):
        client = clocked.client()
        group = client.ready(make_spec(retain_s=60.0))
        assert client.close_group(group) > 0
        assert client.close_group(group) == 0
        eventually(lambda: clocked.used_bytes == 0)

    def test_a_process_that_dies_while_forming_gives_the_memory_back_to_its_job(self, clocked):
        spec = make_spec(retain_s=60.0)
        first = clocked.client(process=True)
        first.ready(spec)
        first.process.kill()
        eventually(lambda: clocked.group_states() == {"moe": "RETAINED"})
        second = clocked.client(process=True)
        second.create(spec)
        second.process.kill()
        eventually(lambda: clocked.group_states() == {"moe": "RETAINED"})
        assert clocked.client().create(spec).reattached


def test_attaching_by_name_alone(daemon):
    spec = make_spec()
    client = daemon.client()
    group = client.ready(spec)
    client.register(group, [layer_specs.LayerSpec("a", top_k=2)])
    found = client.call(client.groups.GetGroup, group_service_pb2.GetGroupRequest(name="moe"))
    assert found.group == client.create(spec).group
    assert [layer.spec.name for layer in found.layers] == ["a"]
    with pytest.raises(errors.StaleHandleError, match="no group 'none' in job 'job'"):
        client.call(client.groups.GetGroup, group_service_pb2.GetGroupRequest(name="none"))


def test_another_generation_is_stale_and_a_stranger_is_no_member(daemon):
    client = daemon.client()
    group = client.ready(make_spec())
    with pytest.raises(errors.PermissionDeniedError, match="claims no rank"):
        daemon.client().ticket(group)
    group.generation += 1
    with pytest.raises(errors.StaleHandleError) as caught:
        client.ticket(group)
    assert caught.value.fields["asked"] == caught.value.fields["generation"] + 1


def test_a_group_of_pure_jax_collectives_holds_no_memory(daemon):
    client = daemon.client()
    group = client.ready(make_spec(transport="xla"))
    assert (group.state, group.window_bytes, group.board_bytes) == (READY, 0, 0)
    assert daemon.used_bytes == 0
    with pytest.raises(errors.InvalidArgumentError, match="needs no windows"):
        client.ticket(group)
    client.register(group, [layer_specs.LayerSpec("a", top_k=1)])


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        ({"transport": "nccl"}, None, "device_uuids must name 2 GPUs for 2 ranks"),
        ({"transport": "nvlink"}, None, "device_uuids must name 2 GPUs for 2 ranks"),
        ({"lanes": 65}, None, "lanes must be at most 64"),
        ({"hidden_size": 1 << 62}, None, "more than any host has"),
        ({"mesh_axes": (("ep", 2), ("ep", 2))}, [0], "unique names"),
        ({"mesh_axes": (("dp", 1 << 40), ("ep", 2))}, [0], "at most"),
        ({}, [], "world_ranks"),
        ({}, [0, 0], "world_ranks"),
        ({}, [0, 2], r"0\.\.1"),
    ],
)
def test_what_no_group_may_be_is_refused(daemon, changes, ranks, message):
    with pytest.raises(errors.InvalidArgumentError, match=message):
        daemon.client().create(make_spec(**changes), ranks)
    assert daemon.group_states() == {}
