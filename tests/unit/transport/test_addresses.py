import os
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from pagemill.errors import ConfigError
from pagemill.transport.addresses import LOCK, PrivateDirectory, check_private, free_port, tcp_address


def test_a_folder_for_this_user_alone(tmp_path):
    with PrivateDirectory(tmp_path) as folder:
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        address = folder.ipc("core-0")
        assert address == f"ipc://{folder.path}/core-0"
        check_private(address)
        (folder.path / "core-0").touch()
    assert list(tmp_path.iterdir()) == []
    folder.remove()


def test_the_base_comes_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEMILL_RPC_BASE_PATH", str(tmp_path))
    with PrivateDirectory() as folder:
        assert folder.path.parent == tmp_path


def test_a_base_that_is_not_there_names_the_variable(tmp_path):
    with pytest.raises(ConfigError, match="PAGEMILL_RPC_BASE_PATH"):
        PrivateDirectory(tmp_path / "none")


def test_a_path_too_long_for_a_socket(tmp_path):
    with PrivateDirectory(tmp_path) as folder, pytest.raises(ConfigError, match="more than 107 bytes"):
        folder.ipc("x" * 108)


def test_a_folder_open_to_others_is_refused(tmp_path):
    with PrivateDirectory(tmp_path) as folder:
        folder.path.chmod(0o755)
        with pytest.raises(ConfigError, match="0700"):
            check_private(folder.ipc("core"))
        folder.path.chmod(0o700)
        link = tmp_path / "link"
        link.symlink_to(folder.path)
        with pytest.raises(ConfigError, match="0700"):
            check_private(f"ipc://{link}/core")
    with pytest.raises(ConfigError, match="cannot be read"):
        check_private(folder.ipc("core"))


def test_what_a_killed_process_left_behind_is_removed(tmp_path):
    dead, alive = (PrivateDirectory(tmp_path) for _ in range(2))
    os.close(dead._lock)  # as the kernel does when the owner is killed
    dead._lock = None
    with PrivateDirectory(tmp_path):
        assert not dead.path.exists()
        assert alive.path.exists()
    alive.remove()


@pytest.mark.slow
def test_folders_that_are_made_at_once_are_not_taken_for_abandoned(tmp_path):
    def make(_):
        folder = PrivateDirectory(tmp_path)
        assert (folder.path / LOCK).exists()
        return folder

    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(make, range(200)))
    assert all(folder.path.exists() for folder in folders)
    for folder in folders:
        folder.remove()


def test_tcp_addresses():
    assert tcp_address() == "tcp://127.0.0.1:0"
    assert tcp_address("10.0.0.5", 7000) == "tcp://10.0.0.5:7000"
    assert tcp_address("::1", 7000) == "tcp://[::1]:7000"
    check_private(tcp_address())
    assert 0 < free_port() < 65536


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*", ""])
def test_nothing_listens_on_every_interface(host):
    with pytest.raises(ConfigError, match="name one address"):
        tcp_address(host)


def test_a_port_out_of_range():
    with pytest.raises(ConfigError, match="70000"):
        tcp_address("127.0.0.1", 70000)


def test_a_folder_that_cannot_be_locked_is_not_left(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("pagemill.transport.addresses.os.open", fail)
    with pytest.raises(ConfigError, match="Too many open files"):
        PrivateDirectory(tmp_path)
    assert list(tmp_path.iterdir()) == []
