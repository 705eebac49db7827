"""Flags and files that make a cluster: endpoints, certificates, plain TCP, the secret's seal."""

from __future__ import annotations

import os
from pathlib import Path

import grpc
import pytest
from cluster_places import make_certificates, place, plain_tcp, tls_flags
from cryptography.hazmat.primitives import serialization
from harness import eventually
from raw_client import WAIT_S, make_spec
from test_cluster import coordinates, joins, link

from ep_runtime import errors, wire
from ep_runtime.errors import InvalidArgumentError
from ep_runtime.v1 import admin_service_pb2, node_service_pb2
from ep_runtime_server import main
from ep_runtime_server.cluster import views
from ep_runtime_server.memory.windows import Owner
from ep_runtime_server.nodes.config import ClusterConfig, Endpoint, parse_endpoint
from ep_runtime_server.nodes.seal import Seal


def read(*words: str) -> ClusterConfig | None:
    return main.make_config(main.build_parser().parse_args(["--dir", "/tmp/d", *words])).cluster


@pytest.fixture
def tls(tmp_path) -> list[str]:
    return tls_flags(make_certificates(tmp_path / "pki", a=""), "a")


# Files that are not read because a flag is wrong.
TLS = [word for name in ("cert", "key", "ca") for word in (f"--tls-{name}", "x")]


def test_without_flags_there_is_no_cluster():
    assert read() is None


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a.lab:1", Endpoint("a.lab", 1)),
        ("10.0.0.1:7700", Endpoint("10.0.0.1", 7700)),
        ("[::1]:7700", Endpoint("::1", 7700)),
        (":7700", Endpoint("default", 7700)),
        ("7700", Endpoint("default", 7700)),
    ],
)
def test_an_endpoint_is_host_and_port(text, wanted):
    found = parse_endpoint(text, "--x", default_host="default")
    assert found == wanted
    assert parse_endpoint(str(found), "--x") == wanted


@pytest.mark.parametrize("text", ["", "a", "a:", "a:b", "a:65536", "::1:80", "unix:/a:1", "a b:1"])
def test_what_is_none_is_refused(text):
    with pytest.raises(InvalidArgumentError, match="--x must be HOST:PORT"):
        parse_endpoint(text, "--x")


def test_a_file_that_is_no_certificate_is_named(tls):
    tls[1], tls[3] = tls[3], tls[1]
    with pytest.raises(
        InvalidArgumentError, match=r"--tls-cert: .*a\.key must be a PEM file with a"
    ):
        read("--coordinator", "127.0.0.1:7700", *tls)


def test_the_key_of_another_certificate_is_named_with_it(tmp_path):
    pki = make_certificates(tmp_path / "pki", a="", b="")
    words = tls_flags(pki, "a")
    words[3] = str(pki / "b.key")
    said = rf"--tls-cert {pki}/a\.pem and --tls-key {pki}/b\.key: they do not belong together"
    with pytest.raises(InvalidArgumentError, match=said):
        read("--coordinator", "127.0.0.1:7700", *words)


def test_a_key_that_cannot_be_read_is_named_with_its_certificate(tls):
    key = serialization.load_pem_private_key(Path(tls[3]).read_bytes(), password=None)
    encrypted = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"x"),
    )
    for text in (encrypted, b"-----BEGIN PRIVATE KEY-----\n"):
        Path(tls[3]).write_bytes(text)
        with pytest.raises(InvalidArgumentError, match=r"a\.pem and .*a\.key: .* a passphrase"):
            read("--coordinator", "127.0.0.1:7700", *tls)


def test_the_key_is_in_no_text_of_the_configuration(tls):
    made = read("--coordinator", "127.0.0.1:7700", *tls)
    assert made is not None
    assert "PRIVATE KEY" not in repr(made)
    assert made.tls is not None
    assert b"PRIVATE KEY" in made.tls.key


def test_with_certificates_a_port_alone_is_every_address(tls):
    made = read("--coordinator", "7700", *tls)
    assert made is not None
    assert made.listen == Endpoint("0.0.0.0", 7700)


def test_plain_tcp_stays_on_loopback_unless_the_address_is_named():
    made = read("--coordinator", "7700", *plain_tcp())
    assert made is not None
    assert made.listen == Endpoint("127.0.0.1", 7700)
    named = read("--coordinator", "10.0.0.1:7700", *plain_tcp())
    assert named is not None
    assert named.listen == Endpoint("10.0.0.1", 7700)


@pytest.mark.parametrize("address", ["0.0.0.0:7700", "[::]:7700"])
@pytest.mark.parametrize("flag", ["--coordinator", "--listen"])
def test_plain_tcp_on_every_address_is_refused(address, flag):
    words = [flag, address] if flag == "--coordinator" else ["--join", "127.0.0.1:1", flag, address]
    with pytest.raises(InvalidArgumentError, match="every address of the host"):
        read(*words, *plain_tcp())


def test_a_node_that_joins_listens_where_it_reaches_the_coordinator(monkeypatch):
    made = read("--join", "127.0.0.1:7700", *plain_tcp(), "--node", "b")
    assert made is not None
    ours, theirs = Endpoint("127.0.0.1", 0), Endpoint("127.0.0.1", 7700)
    assert made == ClusterConfig("b", ours, theirs, secret=made.secret)


def test_plain_tcp_off_loopback_is_not_chosen_for_the_user(monkeypatch):
    monkeypatch.setattr(
        "ep_runtime_server.nodes.config.local_address_towards", lambda target: "10.0.0.2"
    )
    with pytest.raises(InvalidArgumentError, match=r"--listen 10\.0\.0\.2:PORT"):
        read("--join", "10.0.0.1:7700", *plain_tcp())
    assert read("--join", "10.0.0.1:7700", *plain_tcp(), "--listen", "10.0.0.2:0") is not None


HERE = ("--coordinator", "127.0.0.1:7700")


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ([*plain_tcp()], "--insecure needs --coordinator, --join or --cluster"),
        (["--tls-ca", "x"], "--tls-ca needs"),
        (["--node", "a"], "--node needs"),
        (["--coordinator", "1", *plain_tcp(), "--listen", "2"], "--listen needs --join"),
        (["--coordinator", "1", *plain_tcp(), "--node", "A"], "--node must be a lower-case DNS"),
        (["--join", "nowhere.invalid:1", *plain_tcp()], "give --listen HOST:PORT"),
        (["--cluster", "/nonexistent", *plain_tcp()], "cannot read /nonexistent"),
        (HERE, "--tls-cert, --tls-key, --tls-ca missing"),
        ([*HERE, *TLS[:4]], "--tls-ca missing"),
        ([*HERE, *plain_tcp(), *TLS], "give either"),
        ([*HERE, *TLS, *plain_tcp()[1:]], "--secret goes with --insecure"),
        ([*HERE, "--insecure"], "--insecure needs --secret FILE"),
    ],
)
def test_flags_that_make_no_cluster_are_refused(words, match):
    with pytest.raises(InvalidArgumentError, match=match):
        read(*words)


FILE = """
coordinator = "a"
[nodes]
a = "127.0.0.1:7700"
b = "127.0.0.2:7700"
"""


def test_every_node_finds_its_place_in_the_file(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(FILE)
    first = read("--cluster", str(path), *plain_tcp(), "--node", "a")
    second = read("--cluster", str(path), *plain_tcp(), "--node", "b")
    assert first is not None
    assert second is not None
    assert (first.listen, first.coordinator) == (Endpoint("127.0.0.1", 7700), None)
    assert (second.listen, second.coordinator) == (Endpoint("127.0.0.2", 7700), first.listen)
    assert second.coordinator_name == "a"
    assert first.expected == second.expected


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (FILE + "c = 7", "address of 'c'"),
        (FILE + 'C = "h:1"', r"a name in \[nodes\]"),
        (FILE.replace('"a"', '"x"'), r"coordinator must be one of .*, got 'x'"),
        (
            FILE.replace("a = ", "d = ").replace('"a"', '"d"'),
            r"--node .* must be one of .*, got 'a'",
        ),
        (FILE + "[more]", "nothing else; got .'more'"),
        ("[nodes]", 'coordinator = "NAME"'),
        ("coordinator =", "cannot read"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path, text, match):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(InvalidArgumentError, match=match):
        read("--cluster", str(path), *plain_tcp(), "--node", "a")


class TestPlainTcp:
    WORDS = ("--coordinator", "127.0.0.1:7700", "--insecure")

    @pytest.mark.parametrize("flag", ["--allow-uid", "--allow-gid"])
    def test_is_not_for_a_daemon_of_several_users(self, flag):
        with pytest.raises(InvalidArgumentError, match="--insecure must not be given with --allow"):
            read(*self.WORDS[:2], *plain_tcp(), flag, "1000")

    def test_keeps_the_secret_out_of_texts(self):
        made = read(*self.WORDS[:2], *plain_tcp())
        assert made is not None
        assert len(made.secret) == 64
        assert made.secret.decode() not in repr(made)

    @pytest.mark.parametrize(
        ("mode", "text", "said"),
        [
            (0o640, "x" * 32, "chmod 0600"),
            (0o600, "short", "must hold 16 to 4096 bytes, got 5"),
            (0o600, "x" * 5000, "must hold 16 to 4096"),
        ],
    )
    def test_takes_no_secret_that_is_none(self, tmp_path, mode, text, said):
        file = tmp_path / "secret"
        file.write_text(text)
        file.chmod(mode)
        with pytest.raises(InvalidArgumentError, match=said):
            read(*self.WORDS, "--secret", str(file))
        with pytest.raises(InvalidArgumentError, match="cannot read"):
            read(*self.WORDS, "--secret", str(tmp_path / "none"))


SECRET, OTHER = b"a secret of this cluster", b"a secret of another one"
NODE, ADMIN = "/ep_runtime.v1.NodeService/", "/ep_runtime.v1.AdminService/"


def send(address, path, data, metadata=()):
    with grpc.insecure_channel(address, options=wire.channel_options()) as channel:
        try:
            return channel.unary_unary(path)(data, timeout=WAIT_S, metadata=metadata)
        except grpc.RpcError as error:
            raise wire.error_from_rpc(error) from None


def test_a_daemon_of_another_secret_is_refused_and_told(start_daemon):
    address = place()
    start_daemon(cluster=coordinates(address, secret=SECRET))
    b = start_daemon(cluster=joins(address, secret=OTHER))
    eventually(lambda: link(b) == "REFUSED")
    assert "--secret FILE" in str(b.ask("ListEvents"))


TELL = node_service_pb2.TellGroupRequest(node="b", epoch=1, lost_ranks=[0]).SerializeToString()


@pytest.mark.parametrize("secret", [None, OTHER])
@pytest.mark.parametrize(
    ("path", "data"),
    [(f"{NODE}TellGroup", TELL), (f"{NODE}JoinCluster", b""), (f"{ADMIN}ListSessions", b"")],
)
def test_who_has_none_breaks_no_group_and_reads_nothing(start_daemon, secret, path, data):
    address = place()
    daemon = start_daemon(cluster=coordinates(address, secret=SECRET))
    daemon.client().ready(make_spec())
    metadata = Seal(secret).of(path, data) if secret is not None else ()
    with pytest.raises(errors.PermissionDeniedError, match="does not have this cluster's secret"):
        send(address, path, data, metadata)
    assert daemon.group_states() == {"moe": "READY"}


def test_a_seal_is_worth_one_request(start_daemon):
    address, path = place(), f"{ADMIN}ListSessions"
    start_daemon(cluster=coordinates(address, secret=SECRET))
    seal = Seal(SECRET)
    request = admin_service_pb2.ListSessionsRequest(page_size=1).SerializeToString()
    metadata = seal.of(path, request)
    send(address, path, request, metadata)
    for changed_path, data, sealed in (
        (path, request, metadata),  # once more
        (path, b"", seal.of(path, request)),
        (f"{ADMIN}ListGroups", request, seal.of(path, request)),
        (path, request, ((metadata[0][0], "\xe9.x.y".encode().decode("latin-1")),)),
        (path, request, ((metadata[0][0], "a.b"),)),
    ):
        with pytest.raises((errors.PermissionDeniedError, errors.EpRuntimeError)):
            send(address, changed_path, data, sealed)


def test_a_daemon_that_starts_again_answers_a_request_of_before_once(
    daemon_process, restarted, tmp_path
):
    """Answered requests are remembered only in memory; epochs keep the answers true."""
    secret, address = tmp_path / "secret", place()
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    flags = ("--coordinator", address, "--node", "a", "--insecure", "--secret", str(secret))
    first = daemon_process(*flags)
    path = f"{NODE}TellGroup"
    key = views.key_to_proto(Owner(os.geteuid(), "job", "moe"))
    tell = node_service_pb2.TellGroupRequest(node="b", key=key, epoch=1, lost_ranks=[0])
    data = tell.SerializeToString()
    metadata = Seal(SECRET).of(path, data)
    send(address, path, data, metadata)
    second = restarted(first, *flags)
    second.client().ready(make_spec())
    send(address, path, data, metadata)
    assert second.group_states() == {"moe": "READY"}
    with pytest.raises(errors.PermissionDeniedError):
        send(address, path, data, metadata)
