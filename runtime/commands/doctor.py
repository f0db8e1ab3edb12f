"""`chorusline doctor`: what this machine has, what is wrong with it, and the remedies.

It examines the machine that it runs on; on a cluster, run it on a node of each kind. It starts
nothing but one short process.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch

from chorusline.actors.worker.devices import VISIBLE
from chorusline.collectives.shared_memory.compiled import library
from chorusline.collectives.shared_memory.layout import make_memory
from chorusline.collectives.shared_memory.symmetric_memory import make_symmetric
from chorusline.collectives.transports.interfaces import (
    GLOO_VARIABLE,
    NCCL_VARIABLE,
    check_gloo_interfaces,
)
from chorusline.collectives.transports.nccl import load_nccl
from chorusline.collectives.transports.nccl_codes import dotted
from chorusline.collectives.transports.shared_gpus import SHARES_GPUS

from .visible_gpus import traps

_FEWEST_FILES = 4096
_LEAST_SHM_BYTES = 1 << 30
_LEAST_PORTS = 1000
_PATIENCE_S = 30.0  # for a process that opens a file
_ANSWER_S = 3.0


class Severity(Enum):
    """FINE: nothing is wrong. POOR: runs are slower, or fail in some cases. BROKEN: runs fail."""

    FINE = "ok"
    POOR = "note"
    BROKEN = "WRONG"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the result. says: what the machine has. remedy: empty if nothing is wrong."""

    topic: str
    severity: Severity
    says: str
    remedy: str = ""


def fine(topic: str, says: str) -> Finding:
    return Finding(topic, Severity.FINE, says)


def poor(topic: str, says: str, remedy: str) -> Finding:
    return Finding(topic, Severity.POOR, says, remedy)


def broken(topic: str, says: str, remedy: str) -> Finding:
    return Finding(topic, Severity.BROKEN, says, remedy)


def show_doctor() -> int:
    """Exit code: 0, or 1 if something prevents running."""
    findings = list(examine(os.environ))
    wide = max(len(finding.topic) for finding in findings)
    for finding in findings:
        print(f"{finding.severity.value:>5}  {finding.topic:<{wide}}  {finding.says}")
        if finding.remedy:
            print(f"{'':>5}  {'':<{wide}}  -> {finding.remedy}")
    num_broken = sum(finding.severity is Severity.BROKEN for finding in findings)
    some = f"{num_broken} things prevent" if num_broken else "nothing prevents"
    print(f"\n{some} running here")
    return int(num_broken > 0)


def examine(environment: Mapping[str, str]) -> Iterator[Finding]:
    """All findings. environment: read instead of the process's, except for Gloo's variables."""
    groups = {
        "versions": _versions(),
        "command": _command(environment),
        "devices": _devices(),
        VISIBLE: _visible_gpus(environment),
        "nccl": _nccl(),
        "shared memory": _shared_memory(),
        "links": _links(environment),
        "ports": _ports(),
        "RAY_ADDRESS": _address(environment),
        "ray": _ray(environment),
        "limits": _limits(),
    }
    for topic, findings in groups.items():
        try:
            yield from findings
        # A container or a sandbox may lack any folder, or the user. The other findings count still.
        except (OSError, RuntimeError) as error:
            yield poor(
                topic,
                f"could not be examined to the end: {error}",
                "see whether this container or sandbox has what Linux has in /dev, /proc and /sys, "
                "and HOME",
            )


def _versions() -> Iterator[Finding]:
    yield _version("python", platform.python_version(), (3, 11), "install Python 3.11 or newer")
    for package, least in (("torch", (2, 8)), ("ray", (2, 50))):
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield broken(package, "not installed", f"pip install '{package}'")
            continue
        wanted = ".".join(map(str, least))
        yield _version(package, found, least, f"pip install '{package}>={wanted}'")
    try:
        # As a user's program does: it raises if other packages of the same names come first.
        chorusline = importlib.import_module("chorusline")
    except ImportError as error:
        yield broken("chorusline", str(error), "see the line before")
        return
    home = Path(str(chorusline.__file__)).parent
    yield fine("chorusline", f"{chorusline.__version__} in {home}")


def _command(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Whether a terminal, and the jobs of a cluster that runs here, find the program `chorusline`.

    A job has the PATH with which the node's Ray process was started.
    """
    program = Path(sys.executable).with_name("chorusline")
    activate = program.with_name("activate")
    first = f"source {activate}" if activate.exists() else f"export PATH={program.parent}:$PATH"
    found = shutil.which("chorusline", path=environment.get("PATH", ""))
    # Another environment's program would run another version.
    if found is None or Path(found).resolve() != program.resolve():
        yield poor(
            "command",
            f"{program} is not on the PATH"
            if found is None
            else f"`chorusline` is {found}, and not the one beside {sys.executable}",
            f"{first}, also before `ray start`",
        )
    else:
        yield fine("command", found)
    without = [pid for pid, path in _started_nodes() if not shutil.which("chorusline", path=path)]
    if without:
        yield poor(
            "ray's jobs",
            f"`ray start` was called here (pid of the node: {', '.join(map(str, without))}) where "
            "`chorusline` is not on the PATH: jobs end with `chorusline: not found`",
            f"`ray stop`, {first}, `ray start`; or submit {program} run …",
        )


def _started_nodes() -> Iterator[tuple[int, str]]:
    """The pid and the PATH of each Ray node of this user that `ray start` has started here, as
    nodes that take jobs are. A program that calls ray.init is the parent of its own."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if not _words(process / "cmdline")[0].endswith("/raylet"):
                continue
            parent = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
            if parent != "1" and "start" not in _words(Path("/proc", parent, "cmdline")):
                continue
            variables = _words(process / "environ")
        except OSError:
            continue  # It has ended, or belongs to another user.
        for variable in variables:
            if variable.startswith("PATH="):
                yield int(process.name), variable.removeprefix("PATH=")


def _words(file: Path) -> list[str]:
    return file.read_bytes().decode(errors="replace").split("\0")


def _version(name: str, found: str, least: tuple[int, ...], remedy: str) -> Finding:
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdigit())
    if numbers < least:
        return broken(name, f"{found} is too old", remedy)
    return fine(name, found)


def _devices() -> Iterator[Finding]:
    usable = len(os.sched_getaffinity(0))
    yield fine("cpus", f"{usable} of {os.cpu_count()} usable by this process")
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield fine("memory", f"{pages / (1 << 30):.0f} GiB")
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"torch is built for CUDA {built} and sees none" if built else "torch is a CPU build"
        has_gpu = Path("/dev/nvidiactl").exists()
        yield Finding(
            "gpus",
            Severity.POOR if has_gpu else Severity.FINE,
            f"none: {why}",
            "this machine has an NVIDIA driver: install a CUDA build of torch, or see why "
            "`nvidia-smi` fails"
            if has_gpu
            else "",
        )
        return
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    yield fine("gpus", f"{len(names)}: {', '.join(sorted(set(names)))}")


def _visible_gpus(environment: Mapping[str, str]) -> Iterator[Finding]:
    for says, remedy in traps(environment, len(list(Path("/dev").glob("nvidia[0-9]*")))):
        yield poor(VISIBLE, says, remedy)


def _nccl() -> Iterator[Finding]:
    needed = torch.cuda.is_available()
    if importlib.util.find_spec("cupy") is None and not needed:
        yield fine("nccl", "not needed without a GPU")
        return
    try:
        version = load_nccl().get_version()
    except (ImportError, OSError) as error:
        yield Finding(
            "nccl",
            Severity.BROKEN if needed else Severity.POOR,
            str(error).split(". ")[0],
            "pip install -e '.[cuda13]' in a checkout of Chorusline, or [cuda12] beside a CUDA 12 "
            "build of torch",
        )
        return
    says = f"{dotted(version)} in {_library('libnccl')}"
    if version < SHARES_GPUS:
        says += (
            "; ranks that share a GPU use sockets, which is good enough for tests and notebooks on "
            f"one GPU, but slow (NCCL {dotted(SHARES_GPUS)} does better)"
        )
    elif os.environ.get("NCCL_NVLS_ENABLE") == "1":
        # transport/nvls.cc of NCCL refuses this; with its default it does without NVLS.
        says += (
            "; ranks on one GPU, or on parts of one (MIG), cannot connect with NCCL_NVLS_ENABLE=1"
        )
        yield poor("nccl", says, "unset NCCL_NVLS_ENABLE")
        return
    yield fine("nccl", says)


def _library(name: str) -> str:
    """The file of a library that this process has loaded."""
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        if name in line:
            return line.split()[-1]
    return "a library that was linked in"


def _shared_memory() -> Iterator[Finding]:
    """Make a memory segment as ranks of one host share it, and let another process open it."""
    try:
        descriptor = make_memory(2, 1 << 16)
    except OSError as error:
        yield broken(
            "shared memory",
            f"memory for ranks to share cannot be made: {error}",
            "see `ulimit -a` and the memory limit of the container",
        )
        return
    try:
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        opened = subprocess.run(
            [sys.executable, "-S", "-c", f"open({path!r}, 'r+b')"],
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
        )
    except subprocess.TimeoutExpired as error:
        yield broken("shared memory", str(error), "look at the load of this host")
        return
    finally:
        os.close(descriptor)
    if opened.returncode:
        why = opened.stderr.strip().splitlines()[-1]
        yield broken(
            "shared memory",
            f"another process of this user cannot open it: {why}",
            "allow /proc/<pid>/fd between processes of one user (no hidepid, no SELinux or AppArmor"
            " rule against it), or set CHORUSLINE_HOST_ID differently for each rank: then Gloo is "
            "used",
        )
    else:
        yield fine("shared memory", "ranks of this host can share memory (memfd)")
        yield _compiled()
        yield from _symmetric_memory()
        yield from _exits()
    size = shutil.disk_usage("/dev/shm")
    says = f"{size.total / (1 << 30):.1f} GiB, {size.free / (1 << 30):.1f} free (Ray's objects)"
    if size.free < _LEAST_SHM_BYTES:
        yield poor(
            "/dev/shm",
            f"{says}: Ray will use files in /tmp instead, which is slower",
            "start the container with --shm-size=4g, or mount a memory-backed emptyDir there",
        )
    else:
        yield fine("/dev/shm", says)


def _compiled() -> Finding:
    if library() is not None:
        return fine("operations in C", "ranks that share memory run them in C")
    return poor(
        "operations in C",
        "ranks that share memory run them in Python, which is slower: the installation found no C "
        "compiler, or its library is not for this machine",
        "install gcc, and install Chorusline again (in a checkout: make compile)",
    )


def _symmetric_memory() -> Iterator[Finding]:
    """Make a tensor as large as that of a model; no page of it takes memory."""
    try:
        make_symmetric(1 << 30, torch.uint8)
    except OSError as error:
        yield poor(
            "symmetric memory",
            f"a tensor of 1 GiB that ranks read in place cannot be made: {error}; such tensors "
            "are ordinary ones then, and their data is copied once more",
            "see `ulimit -f`, `ulimit -n` and `ulimit -v`",
        )


def _exits() -> Iterator[Finding]:
    """Ask the kernel to say when a process ends, as ranks do of each other."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        yield poor(
            "lost processes",
            "this kernel, sandbox or Python does not report the end of a process (pidfd_open: "
            f"{getattr(error, 'strerror', error)}): ranks look in /proc, and notice a lost rank a "
            "little later",
            "Linux 5.3 has it; allow it in the sandbox (gVisor, an older seccomp profile)",
        )


def _links(environment: Mapping[str, str]) -> Iterator[Finding]:
    here = [name for _, name in socket.if_nameindex()]
    speeds = ", ".join(f"{name}{_speed(name)}" for name in here)
    yield fine("links", speeds)
    of_gloo = os.environ.get(GLOO_VARIABLE, "")
    try:
        check_gloo_interfaces()
    except ValueError as error:
        yield broken(GLOO_VARIABLE, str(error), f"export {GLOO_VARIABLE}={_likely(here)}")
    else:
        if of_gloo:
            yield fine(GLOO_VARIABLE, f"is {of_gloo!r}: ranks on CPUs of several hosts use that")
    wanted = environment.get(NCCL_VARIABLE, "")
    if wanted and not _nccl_finds(wanted, here):
        yield broken(
            NCCL_VARIABLE,
            f"is {wanted!r}, which leaves none of {', '.join(here)}",
            f"export {NCCL_VARIABLE}={_likely(here)}",
        )
    elif wanted:
        yield fine(NCCL_VARIABLE, f"is {wanted!r}: ranks on GPUs of several hosts use that")
    # Gloo listens on the address of the host's name, unless a variable names an interface.
    if of_gloo:
        return
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = ""
    if not address or address.startswith("127."):
        at = f"is {address}, the loopback" if address else "has no address"
        yield poor(
            "host name",
            f"{name} {at}: between hosts, Gloo would use an address that only this host has",
            f"export {GLOO_VARIABLE}={_likely(here)} for runs on several hosts",
        )
    else:
        yield fine("host name", f"{name} is {address}")


def _speed(name: str) -> str:
    try:
        speed = int(Path(f"/sys/class/net/{name}/speed").read_text())
    except (OSError, ValueError):
        return ""
    return f" ({speed / 1000:g} Gbit/s)" if speed > 0 else ""


def _likely(names: list[str]) -> str:
    """The interface by which this host reaches other hosts: that of the default route."""
    for line in Path("/proc/net/route").read_text().splitlines()[1:]:
        name, destination = line.split()[:2]
        if destination == "00000000" and name in names:
            return name
    return next((name for name in names if name != "lo"), "lo")


def _nccl_finds(wanted: str, here: list[str]) -> bool:
    """Whether NCCL finds an interface. wanted: prefixes with commas between; `=` in front means
    whole names, `^` in front means all other interfaces."""
    is_not, text = wanted.startswith("^"), wanted.removeprefix("^")
    is_exact, text = text.startswith("="), text.removeprefix("=")
    named = [part for part in text.split(",") if part]
    found = [n for n in here if any(n == p if is_exact else n.startswith(p) for p in named)]
    return len(found) < len(here) if is_not else bool(found)


def _ports() -> Iterator[Finding]:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    if high - low < _LEAST_PORTS:
        yield poor(
            "ports",
            f"{low} to {high} for outgoing connections",
            "sysctl -w net.ipv4.ip_local_port_range='32768 60999'",
        )
    try:
        with socket.socket() as one:
            one.bind(("", 0))
            one.listen()
            with socket.create_connection(("127.0.0.1", one.getsockname()[1]), _ANSWER_S):
                pass
    except OSError as error:
        yield broken(
            "ports",
            f"this process cannot listen and be reached on this host: {error}",
            "allow connections of this host to itself in the firewall",
        )
        return
    yield fine("ports", f"{low} to {high}; between hosts all of them must be open")


def _address(environment: Mapping[str, str]) -> Iterator[Finding]:
    address = environment.get("RAY_ADDRESS", "")
    # "local" is a cluster that is still to be started, and a URL leads to no port of the head.
    if address in ("", "local") or "://" in address:
        return
    try:
        from ..session.connecting import reached
    except ImportError:
        return  # Ray is missing, which was said before.
    try:
        found = reached(address)
    except OSError as error:
        is_auto = address == "auto"
        yield broken(
            "RAY_ADDRESS",
            "auto, and no Ray cluster answers on this machine"
            if is_auto
            else f"nothing answers at {address}: {error}",
            "correct it, unset it to have a local cluster, or `ray start --head` "
            f"{'here' if is_auto else 'there'}",
        )
        return
    yield fine("RAY_ADDRESS", f"a cluster answers at {found}")


def _ray(environment: Mapping[str, str]) -> Iterator[Finding]:
    mode = environment.get("RAY_AUTH_MODE", "")
    token = Path(environment.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser()
    has_token = token.exists() or "RAY_AUTH_TOKEN" in environment
    if mode == "token" and not has_token:
        yield broken(
            "ray's auth mode",
            f"token, and there is none in {token}",
            "copy the cluster's token there, or set RAY_AUTH_TOKEN; `ray get-auth-token` shows it",
        )
    elif not mode and token.exists():
        yield poor(
            "ray's auth mode",
            f"not set, and there is a token in {token}: clusters that are started here ask for it",
            "export RAY_AUTH_MODE=token, or =disabled, the same for the cluster and for what "
            "connects to it",
        )
    elif mode not in ("", "token", "disabled"):
        yield broken(
            "ray's auth mode",
            f"RAY_AUTH_MODE is {mode!r}, which Ray does not know",
            "export RAY_AUTH_MODE=token or RAY_AUTH_MODE=disabled",
        )
    elif mode == "token":
        yield fine("ray's auth mode", mode)
    else:
        yield poor(
            "ray's auth mode",
            f"{mode or 'not set, and no token here'}: whoever reaches Ray's ports, which are open "
            "on every interface, runs code as you",
            "ray get-auth-token --generate, and export RAY_AUTH_MODE=token, the same for the "
            "cluster and for what connects to it",
        )


def _limits() -> Iterator[Finding]:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < _FEWEST_FILES:
        yield poor(
            "open files",
            f"at most {files}, and Ray opens many",
            f"ulimit -n {most if most >= _FEWEST_FILES else 65536}",
        )
    else:
        yield fine("open files", f"at most {files}")
    disk = shutil.disk_usage("/tmp")
    says = f"{disk.free / (1 << 30):.0f} GiB free (Ray's logs and spilled objects)"
    if disk.free < 0.05 * disk.total:
        yield poor(
            "/tmp",
            f"{says}, less than a twentieth: Ray stops creating objects",
            "make room, or start Ray with --temp-dir",
        )
    else:
        yield fine("/tmp", says)
