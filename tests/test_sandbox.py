"""The sandbox under attack: what a program must not reach, what must not survive it, what must still work.

Symptom, in other projects: the trainer hangs on a program that never ends, zombies pile up until no process can be
started, and every score becomes 0. Cause: a time limit by signal.alarm does nothing outside the main thread, a child
that nobody waits for stays, and a daemon leaves the group that gets killed. Guard: each program is a process apart,
watched from outside and ended by descent, from any thread. The attacks here are run for real, so most of the file is
skipped where the kernel has no Landlock.

The tests judge by status and by the order of events, not by the clock: programs have a low priority, so that they are
slow on a busy machine. Where a time is bounded, only a real hang is over the bound.
"""

import ctypes
import importlib.util
import os
import random
import re
import resource
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import agents
from agents import FileEntry, InputError, Limits, Result, Sandbox, SandboxError, descendants

HERE = os.path.dirname(os.path.abspath(agents.__file__))
MB = 1 << 20
KEY = "sk-SECRET-12345"
PLACES = ("/tmp", "/var/tmp", "/dev/shm", "/etc", "/home", "/root")
TRUTH = "id,y\n1,GROUNDTRUTH\n"
LONG = 60.0  # seconds: no honest step takes so long, even on a busy machine

# Put before the attacks of a table. attempt() tells apart a refusal (OSError), a success, and an attack that is broken
# itself: any other exception ends the program with status error, which fails the test.
TOOLS = """
import ctypes, os, resource, signal, socket, stat, sys
libc = ctypes.CDLL(None, use_errno=True)

def call(what, *args):
    "A libc function by name or a system call by number; a negative result is an OSError."
    args = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    got = getattr(libc, what)(*args) if isinstance(what, str) else libc.syscall(ctypes.c_long(what), *args)
    if got < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return got

def attempt(attack):
    try:
        exec(attack, globals())
        print("SUCCEEDED:", attack)
    except OSError as error:
        print("refused:", attack, error)
"""


class Host:
    """What the trainer's side has to lose: answers, a project, servers; and a list of what reached it."""

    def __init__(self, sandbox):
        self.folder = Path(tempfile.mkdtemp(prefix="host-"))
        self.truth = self.folder / "answers.csv"
        self.project = self.folder / "train.py"
        self.truth.write_text(TRUTH)
        self.project.write_text("original")
        for path in (self.folder, self.truth, self.project):
            path.chmod(0o777)  # open to all: only the sandbox is in the way
        self.reached = []
        self.previous = signal.signal(signal.SIGUSR1, lambda *_: self.reached.append("signal"))
        self.tcp = self._server(socket.AF_INET, ("127.0.0.1", 0))
        self.unix = self._server(socket.AF_UNIX, str(self.folder / "socket"))
        (self.folder / "socket").chmod(0o777)
        self.abstract = self._server(socket.AF_UNIX, f"\0sandbox-test-{os.getpid()}")
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.other = sandbox.make_workspace({"secret.csv": TRUTH.encode()})
        self.names = dict(
            truth=str(self.truth),
            project=str(self.project),
            folder=str(self.folder),
            other=self.other,
            unix=str(self.folder / "socket"),
            abstract=f"sandbox-test-{os.getpid()}",
            here=HERE,
            tcp=self.tcp.getsockname()[1],
            udp=self.udp.getsockname()[1],
            host=os.getpid(),
            zygote=sandbox.process.pid,
            clone=56 if os.uname().machine == "x86_64" else 220,
            packages=[path for path in sys.path if path.endswith("site-packages")][0],
        )

    def _server(self, family, address):
        server = socket.socket(family)
        server.bind(address)
        server.listen(50)
        threading.Thread(target=self._serve, args=(server,), daemon=True).start()
        return server

    def _serve(self, server):
        with server:
            while True:
                try:
                    server.accept()[0].close()
                except OSError:
                    return
                self.reached.append("connection")

    def untouched(self):
        assert self.truth.read_text() == TRUTH
        assert self.project.read_text() == "original"
        assert stat.S_IMODE(self.project.stat().st_mode) == 0o777
        assert self.project.stat().st_nlink == 1
        assert sorted(os.listdir(self.folder)) == ["answers.csv", "socket", "train.py"]
        assert os.listdir(self.other) == ["secret.csv"]
        assert self.reached == []
        return True

    def close(self):
        signal.signal(signal.SIGUSR1, self.previous)
        subprocess.run(["rm", "-rf", str(self.folder)])


def landlock_version():
    return ctypes.CDLL(None).syscall(agents.LANDLOCK_CREATE, None, 0, 1) if agents.LINUX else 0


def skip_without_signals(name):
    """Before version 6 Landlock lets signals through, so that a program is refused them even to itself."""
    if name in ("stops itself", "killed", "group killed", "abort", "child ended") and landlock_version() < 6:
        pytest.skip(f"Landlock {landlock_version()} doesn't confine signals: programs can't send any")


def wait_until(condition, seconds=LONG):
    """Wait for an event. It fails only where the event does not come at all."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def wait_for_file(workspace, name):
    wait_until(lambda: os.path.exists(os.path.join(workspace, name)))


def state_and_parent(pid):
    """The state of a process (Z: a zombie) and its parent's id."""
    state, parent = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[:2]
    return state, int(parent)


def left(sandbox):
    """Processes that outlived the run that just returned. (Its supervisor, which is ours, may take a moment.)"""
    zygote = sandbox.process.pid
    below = []
    for pid in descendants(zygote):
        try:
            if state_and_parent(pid)[1] != zygote:
                below.append(pid)
        except OSError:  # it ended meanwhile
            pass
    if not below:
        wait_until(lambda: not descendants(zygote))
    return below


def resident():
    """The memory that this process holds, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.fixture(scope="module")
def sandbox():
    # Asked of the kernel, not of Sandbox: a lockdown that fails must fail the tests, not skip them.
    if landlock_version() < 1:
        pytest.skip("this kernel has no Landlock (Linux >= 5.13)")
    # Where the tests are started with SIGTERM ignored, so would be all programs: children inherit it.
    previous = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUDGE_API_KEY", KEY)
        with Sandbox(timeout=LONG, memory=512 * MB, disk=32 * MB) as made:
            yield made
    signal.signal(signal.SIGTERM, previous)


@pytest.fixture(scope="module")
def host(sandbox):
    made = Host(sandbox)
    yield made
    made.close()


@pytest.fixture
def workspace(sandbox):
    path = sandbox.make_workspace({"train.csv": b"a,b\n1,2\n"})
    yield path
    sandbox.remove_workspace(path)
    assert not os.path.exists(path) and path not in sandbox.workspaces


# ---- What prompts promise --------------------------------------------------------------------------------------------

REFUSED_BY_DESIGN = {
    "sockets": "import socket\nsocket.socket()",
    "pools of processes": "import multiprocessing\nmultiprocessing.Pool(2)",
    "network": "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:9')",
}


@pytest.mark.parametrize("what", REFUSED_BY_DESIGN)
def test_what_is_refused_by_design_is_said_in_the_prompt(sandbox, workspace, what):
    """Symptom: an agent's Pool fails with "Permission denied", and it tries again. Guard: its prompt says so before."""
    for agent in [*agents.MATHCHAT.agents, *agents.DSBENCH.agents]:
        assert not agent.uses_tools or what in agent.role
    assert sandbox.run(REFUSED_BY_DESIGN[what], workspace).status == "error"
    threads = "from concurrent.futures import ThreadPoolExecutor\nprint(sum(ThreadPoolExecutor(2).map(abs, [1, -2])))"
    assert sandbox.run(threads, workspace).output == "3\n"


# ---- Attacks in tables -----------------------------------------------------------------------------------------------

# The names in braces are those of Host.names.
ATTACKS = {
    "read the answers": [
        "open({truth!r}).read()",
        "os.listdir({folder!r})",
        "os.open({truth!r}, os.O_RDONLY | os.O_NONBLOCK)",
        "fd = os.open({truth!r}, os.O_PATH); open(f'/proc/self/fd/{{fd}}').read()",
        "os.chdir({folder!r}); open('answers.csv').read()",
        "os.symlink({truth!r}, 'link'); open('link').read()",
        "open('/proc/self/root' + {truth!r}).read()",
        "open('/proc/self/cwd/../' + os.path.basename({folder!r}) + '/answers.csv').read()",
        "open('/proc/{host}/root' + {truth!r}).read()",
        "open('/proc/{zygote}/root' + {truth!r}).read()",
        "open(f'/proc/{{os.getppid()}}/root' + {truth!r}).read()",
        "os.execv({truth!r}, ['x'])",
        "call('inotify_add_watch', call('inotify_init1', 0), {folder!r}.encode(), 0xFFF)",
    ],
    "look around": [
        "os.listdir({here!r})",
        "open({here!r} + '/agents.py').read()",
        "open('/etc/shadow').read()",
        *[f"os.listdir({path!r})" for path in ("/", *PLACES, "/var", "/proc", "/dev")],
    ],
    "write outside": [
        "open({project!r}, 'w').write('pwned')",
        "open({project!r}, 'a').write('pwned')",
        "os.truncate({project!r}, 0)",
        "os.open({project!r}, os.O_RDONLY | os.O_TRUNC)",
        "os.unlink({project!r})",
        "os.rename({project!r}, {project!r} + '.old')",
        "os.rename({project!r}, 'mine')",
        "os.link({project!r}, 'mine')",
        "os.link('train.csv', {folder!r} + '/mine')",
        "os.symlink('x', {folder!r} + '/mine')",
        "os.mkdir({folder!r} + '/mine')",
        "os.mkfifo({folder!r} + '/mine')",
        "open({packages!r} + '/evil.pth', 'w')",
        "open({here!r} + '/agents.py', 'a')",
        "open('/proc/sys/kernel/core_pattern', 'r+')",
        "open('/proc/sysrq-trigger', 'r+')",
        "open('/proc/self/oom_score_adj', 'r+')",
        *[f"open('{place}/evil', 'w')" for place in PLACES],
    ],
    "another episode's workspace": [
        "os.listdir({other!r})",
        "open({other!r} + '/secret.csv').read()",
        "open({other!r} + '/mine', 'w')",
        "os.unlink({other!r} + '/secret.csv')",
        "os.rmdir({other!r})",
        "os.rename('train.csv', {other!r} + '/mine')",
    ],
    "other processes' memory": [
        *[
            f"open('/proc/{pid}/{file}', 'rb').read(1)"
            for pid in ("{host}", "{zygote}", "1")
            for file in ("environ", "mem", "maps")
        ],
        "os.listdir('/proc/{host}/fd')",
        "os.readlink('/proc/{host}/cwd')",
        "os.readlink('/proc/{host}/exe')",
        "open(f'/proc/{{os.getppid()}}/environ', 'rb').read(1)",
        "open(f'/proc/{{os.getppid()}}/mem', 'rb').read(1)",
        "call('ptrace', 16, {host}, 0, 0)",
        "call('ptrace', 16, os.getppid(), 0, 0)",
        "call('ptrace', 0, 0, 0, 0)",
        "call('process_vm_readv', {host}, 0, 0, 0, 0, 0)",
        "call(438, os.pidfd_open({host}), 1, 0)",
    ],
    "other processes' lives": [
        "os.kill({host}, signal.SIGUSR1)",
        "os.kill({zygote}, signal.SIGTERM)",
        "os.kill(os.getppid(), signal.SIGKILL)",
        "os.kill(1, 0)",
        "os.killpg(os.getpgid({host}), 0)",
        "os.kill(-1, 0) or os.kill({host}, 0)",
        "signal.pidfd_send_signal(os.pidfd_open({host}), signal.SIGUSR1)",
        "resource.prlimit({host}, resource.RLIMIT_CORE, (0, 0))",
        "os.setpriority(os.PRIO_PROCESS, {host}, 19)",
        "os.setpriority(os.PRIO_USER, 0, 19)",
        "os.sched_setaffinity({host}, [0])",
        "os.sched_setaffinity(0, [0, 1])",
        "os.sched_setscheduler({host}, os.SCHED_IDLE, os.sched_param(0))",
    ],
    "network": [
        "socket.create_connection(('127.0.0.1', {tcp}), 1)",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {udp}))",
        "socket.socket(socket.AF_UNIX).connect({unix!r})",
        "socket.socket(socket.AF_UNIX).connect(chr(0) + {abstract!r})",
        "socket.getaddrinfo('example.org', 80)",
        "socket.socket(10, 1)",
        "socket.socket(16, 3)",
        "socket.socket(17, 3)",
        "socket.socket(40, 1)",
        "socket.socket(2, 3)",
    ],
    "rights of root": [
        "os.setuid(0) if os.getuid() else os.chown('train.csv', 1, 1)",
        "os.chroot('.')",
        "os.mknod('disk', 0o600 | stat.S_IFBLK, os.makedev(254, 0))",
        "call('mount', b'x', b'.', b'tmpfs', 0, 0)",
        "call('mount', 0, b'/usr', 0, 32 | 4096, 0)",
        "call('umount2', b'/usr', 2)",
        "call('sethostname', os.uname().nodename.encode(), len(os.uname().nodename))",
        "open('/usr/bin/evil', 'w')",
        *[f"open('/dev/{device}', 'rb')" for device in ("vda", "sda", "mem", "kmsg", "kvm", "ptmx")],
        *[f"resource.prlimit(0, resource.RLIMIT_{name}, (-1, -1))" for name in ("AS", "CPU", "FSIZE", "CORE")],
    ],
    "new namespaces": [
        "call('unshare', 0x10000000)",
        "call('unshare', 0x10020000)",
        "call('setns', 0, 0)",
        "call({clone}, 0x10000000 | 17, 0, 0, 0, 0) or os._exit(0)",
    ],
    "memory that no limit counts": [
        "call('memfd_create', b'x', 0)",
        "call('shmget', 0, 300 << 20, 0o1666)",
        "call('msgget', 0, 0o1666)",
        "call('semget', 0, 1, 0o1666)",
        "call('prctl', 4, 0, 0, 0, 0)",  # not memory, but hides what a process writes
    ],
}


@pytest.mark.parametrize("name", ATTACKS)
def test_refused(sandbox, host, workspace, name):
    """An exploring program tries all that would reach the answers, the trainer or the system: each one is refused."""
    attacks = [attack.format(**host.names) for attack in ATTACKS[name]]
    code = TOOLS + "".join(f"attempt({attack!r})\n" for attack in attacks)
    result = sandbox.run(code, workspace)
    assert "SUCCEEDED" not in result.output and "GROUNDTRUTH" not in result.output
    assert result.output.count("refused: ") == len(attacks) and result.status == "ok", result.output
    assert host.untouched()
    evil = [f"{place}/evil" for place in PLACES] + [host.names["packages"] + "/evil.pth"]
    assert not any(map(os.path.exists, evil))


@pytest.mark.parametrize("name", agents.REFUSED)
def test_every_refused_call(sandbox, workspace, name):
    """A wrong number in the table would refuse some other call: with senseless arguments each one gives EPERM."""
    number = agents.REFUSED[name][agents.MACHINES.index("linux " + os.uname().machine)]
    code = f"""
try:
    call({number}, -1, -1, -1, -1, -1)
except OSError as error:
    print(error.errno)
"""
    assert sandbox.run(TOOLS + code, workspace).output == "1\n"


def test_changing_modes_is_pretended(sandbox, host, workspace):
    """chmod of the user's own files: Landlock doesn't look after it, and refusing it would break shutil.copy."""
    code = f"""
import os, shutil

os.chmod({str(host.project)!r}, 0)
os.fchmod(os.open("train.csv", os.O_RDONLY), 0)
shutil.copy("train.csv", "copy.csv")
print(open("copy.csv").read())
"""
    assert sandbox.run(code, workspace).status == "ok"
    assert host.untouched()


def test_the_key_is_nowhere(sandbox, workspace):
    """A clean environment was worthless while /proc/<parent>/environ could be read."""
    code = f"""
import os

print(dict(os.environ))
for pid in [*range(1, 5000), os.getppid(), {os.getpid()}, {sandbox.process.pid}]:
    for file in ("environ", "cmdline"):
        try:
            print(open(f"/proc/{{pid}}/{{file}}").read())
        except OSError:
            pass
"""
    result = sandbox.run(code, workspace)
    assert result.status == "ok" and "HOME" in result.output and KEY not in result.output


def test_exec_gives_no_rights_back(sandbox, workspace):
    """Root that executes a program gets its capabilities back, and su is setuid, unless new privileges are given up."""
    code = "import os; os.execv('/bin/cat', ['cat', '/proc/self/status'])"
    output = sandbox.run(code, workspace).output
    lines = dict(line.split(":\t", 1) for line in output.splitlines() if ":\t" in line)
    assert lines["NoNewPrivs"] == "1" and lines["Seccomp"] == "2"
    assert int(lines["CapEff"], 16) == int(lines["CapPrm"], 16) == int(lines["CapInh"], 16) == 0
    if sandbox.user is not None:
        assert set(lines["Uid"].split()) == {"65534"} and lines["Groups"].strip() == ""
    result = sandbox.run("import os; os.system('su -c id </dev/null; sudo -n id')", workspace)
    assert "uid=0" not in result.output


def test_inherited_descriptors(sandbox, workspace):
    """A program that finds the line to the host could write its own report: nothing but 0, 1, 2 is open."""
    code = """
import os

for fd in range(3, 300):
    try:
        os.write(fd, b"{}")
        print("WROTE", fd)
    except OSError:
        pass
print(os.listdir("/proc/self/fd"))
"""
    result = sandbox.run(code, workspace)
    assert result.output.strip() == "['0', '1', '2', '3']"  # 3 is the listing itself


# ---- Ends and remains ------------------------------------------------------------------------------------------------

ENDLESS = {
    "loop": "while True: pass",
    "ignores every signal": """
import signal

for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    pass
""",
    "stops itself": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "sleeps": "import time; time.sleep(1000)",
    "thread": "import threading, time; threading.Thread(target=time.sleep, args=(1000,)).start()",
    "at exit": "import atexit, time; atexit.register(time.sleep, 1000)",
    "waits for a child": """
import os, time

if os.fork() == 0:
    time.sleep(1000)
os.wait()
""",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_programs_end(sandbox, workspace, name):
    """A program that never ends is ended at its limit, whatever it does with signals; its output is kept."""
    skip_without_signals(name)
    for timeout in (0.3, 5.0):
        started = time.monotonic()
        result = sandbox.run("print('before')\n" + ENDLESS[name], workspace, timeout=timeout)
        took = time.monotonic() - started
        assert result.status == "timeout" and result.code is None
        assert timeout <= result.seconds <= took < timeout + 15  # GRACE, after which we would give up, is 60
        if result.output:  # else it did not come to its first line, on a busy machine: once more, for longer
            break
    assert result.output.startswith("before\n")


# Each writes into the file "beat" for ever, from a process that a kill of the program alone does not reach.
DAEMONS = {
    "double fork": """
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    os.closerange(0, 10)
    for number in (1, 2, 15):
        signal.signal(number, signal.SIG_IGN)
    beat()
""",
    "holds the output": """
if os.fork() == 0:
    os.setsid()
    beat()
""",
    "chain of forks": """
if os.fork() == 0:
    os.closerange(0, 10)
    while True:
        if os.fork():
            os._exit(0)
        os.setsid()
        write()
""",
    "two chains": """
if os.fork() == 0:
    os.fork()
    while True:
        if os.fork():
            os._exit(0)
        write()
""",
    "no death signal": """
if clone(0) == 0:
    beat()
""",
    "sibling": """
if clone(0x8000) == 0:
    beat()
""",
}
BEFORE_DAEMON = """
import ctypes, os, signal, time

def write():
    with open("beat", "a") as file:
        file.write("x")

def beat():
    while True:
        write()
        time.sleep(0.005)

def clone(flags):
    return ctypes.CDLL(None).syscall(*map(ctypes.c_long, (56, flags, 0, 0, 0, 0)))
"""
AFTER_DAEMON = """
while not os.path.exists("beat") or os.path.getsize("beat") == 0:
    time.sleep(0.01)
print("done")
"""


@pytest.mark.parametrize("name", DAEMONS)
def test_daemons_die_with_the_program(sandbox, workspace, name):
    """A double-forked daemon survived killpg and wrote into the next action's files; descent finds every one."""
    if "clone" in DAEMONS[name] and os.uname().machine != "x86_64":
        pytest.skip("the number of clone is that of x86_64")
    result = sandbox.run(BEFORE_DAEMON + DAEMONS[name] + AFTER_DAEMON, workspace)
    size = os.path.getsize(os.path.join(workspace, "beat"))
    assert result.status == "ok" and "done" in result.output  # so no daemon put off the end until the time limit
    assert size > 0 and not left(sandbox)
    time.sleep(0.1)
    assert os.path.getsize(os.path.join(workspace, "beat")) == size


def test_no_zombies(sandbox, workspace):
    """In a container the trainer is process 1 and inherits what nobody waits for: after 20 runs nothing is there."""
    code = """
import os

for _ in range(5):
    if os.fork() == 0:
        os.fork()
        os._exit(0)
"""
    assert {sandbox.run(code, workspace).status for _ in range(20)} == {"ok"}
    assert left(sandbox) == []
    assert not any(state_and_parent(pid)[0] == "Z" for pid in descendants(os.getpid()))


def script(code, **kinds):
    """Start another trainer that runs this code, with all names of agents.py imported."""
    before = f"import ctypes, os, struct, sys, threading, time\nsys.path.insert(0, {HERE!r})\nfrom agents import *\n"
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([sys.executable, "-c", before + code], **pipes, **kinds)


@pytest.mark.parametrize("end", ["kill -9", "close", "exit"])
def test_no_program_outlives_the_host(sandbox, end):
    """A killed training job left its programs running on the machine: the closed line ends them all."""
    program = """
import os, time

if os.fork() == 0:
    os.setsid()
    open("beat", "w")
while True:
    time.sleep(0.1)
"""
    code = f"""
sandbox = Sandbox(timeout=1000)
workspace = sandbox.make_workspace()
threading.Thread(target=lambda: sandbox.run({program!r}, workspace), daemon=True).start()
while not os.path.exists(workspace + "/beat"):
    time.sleep(0.01)
print(':'.join([workspace, *sandbox.workspaces]), sandbox.process.pid, *descendants(sandbox.process.pid), flush=True)
if {end!r} == "close":
    sandbox.close()
    print(*descendants(os.getpid()), flush=True)
if {end!r} != "exit":
    time.sleep(1000)
"""
    other = script(code)
    workspaces, *pids = other.stdout.readline().split()
    try:
        assert len(pids) >= 4  # zygote, supervisor, program and its daemon
        if end == "close":
            assert other.stdout.readline() == "\n"
        if end == "kill -9":
            other.kill()
        if end == "exit":
            other.wait(LONG)
        wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
        assert end == "kill -9" or not any(map(os.path.exists, workspaces.split(":")))
    finally:
        other.kill()
        other.communicate()
        subprocess.run(["rm", "-rf", *workspaces.split(":")])


def test_zygote_killed(sandbox, workspace):
    """The zygote may be killed (out of memory): the run in progress goes on, the next one starts another."""
    code = """
import os, time

open("on", "w")
while not os.path.exists("go"):
    time.sleep(0.01)
print("end")
"""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(sandbox.run, code, workspace)
        wait_for_file(workspace, "on")
        sandbox.process.kill()
        sandbox.process.wait()
        assert sandbox.run("print('next')", workspace).output == "next\n"
        Path(workspace, "go").touch()
        assert running.result().output == "end\n"


def test_supervisor_killed_is_retried(sandbox, workspace):
    """Our own failure says nothing about the program: it runs again, and counts only then."""
    code = """
import os, time

if os.path.exists("twice"):
    print("second")
else:
    open("twice", "w")
    time.sleep(1000)
"""
    assert sandbox.run("pass", workspace).status == "ok"  # so that there is a zygote
    assert not left(sandbox)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(sandbox.run, code, workspace)
        wait_for_file(workspace, "twice")
        supervisor, program = descendants(sandbox.process.pid)
        os.kill(supervisor, signal.SIGKILL)
        result = running.result()
    assert (result.status, result.output) == ("ok", "second\n")
    wait_until(lambda: not os.path.exists(f"/proc/{program}"))


def test_a_dying_zygote_is_replaced(sandbox, workspace):
    """A killed zygote takes a moment to end: the retry met the same one, and a single kill ended the training."""
    assert sandbox.run("pass", workspace).status == "ok"  # so that there is a zygote
    dying = sandbox.process
    sandbox.line.shutdown(socket.SHUT_RDWR)  # it ends now, but it is still alive, and cannot be reached
    assert sandbox.run("print('next')", workspace).output == "next\n"
    assert sandbox.process is not dying and dying.returncode is not None


def test_one_kill_of_the_zygote_under_load(sandbox):
    """Of 48 programs in 16 threads none is lost when the zygote is killed once."""

    def episode(_):
        workspace = sandbox.make_workspace()
        status = sandbox.run("pass", workspace).status
        sandbox.remove_workspace(workspace)
        return status

    episode(0)
    threading.Timer(0.1, sandbox.process.kill).start()
    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(episode, range(48))) == {"ok"}


WHOLE_REPORT = b'{"status": "ok", "output": "x", "code": 0, "seconds": 1.0}\n'
BROKEN_REPORTS = [b"", WHOLE_REPORT[:-2], b'{"status": "ok"}\n', b"\xff\0\n"]


@pytest.mark.parametrize("report", BROKEN_REPORTS)
def test_a_broken_report_is_our_failure(workspace, report):
    """A supervisor that is killed in the middle of its report: the run is tried again, once, and then we failed."""
    reports = []

    def play_zygote(line):
        with line:
            while reports:
                descriptors = socket.recv_fds(line, 1, 1)[1]
                with socket.socket(fileno=descriptors[0]) as control:
                    control.makefile("rb").readline()
                    control.sendall(reports.pop(0))

    with Sandbox(cores=[0]) as made:
        made.line.close()  # its zygote ends
        made.process.wait(LONG)
        made.process = subprocess.Popen(["sleep", "1000"])  # one that is alive
        made.line, end = socket.socketpair()
        reports += [report, WHOLE_REPORT, report, report]
        threading.Thread(target=play_zygote, args=(end,)).start()
        assert made.run("", workspace) == Result("ok", "x", 0, 1.0)
        with pytest.raises(SandboxError, match="supervisor"):
            made.run("", workspace)
        assert reports == [] and made.cores.qsize() == 1
        made.process.kill()


def test_ctrl_c_gives_the_core_back(sandbox, workspace):
    """An interrupted run kept its core for ever: after a few the training stood still.

    Python raises KeyboardInterrupt only if SIGINT was not ignored when it started. In a job that a script starts in the
    background it is, so the test sets the handler itself.
    """

    def interrupt():
        wait_for_file(workspace, "on")
        os.kill(os.getpid(), signal.SIGINT)

    cores = sandbox.cores.qsize()
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            sandbox.run("open('on', 'w')\nwhile True: pass", workspace)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert sandbox.cores.qsize() == cores and not left(sandbox)
    assert sandbox.run("print(1)", workspace).output == "1\n"


def test_many_threads(sandbox):
    """64 episodes ask at once: they queue for the cores, none fails, none sees another's files or output."""

    def episode(number):
        workspace = sandbox.make_workspace()
        for turn in range(4):
            code = f"open('n', 'a').write('{number} '); print({number}, open('n').read())"
            result = sandbox.run(code, workspace)
            assert result.status == "ok" and result.output.split() == [str(number)] * (turn + 2), result
        sandbox.remove_workspace(workspace)
        return True

    with ThreadPoolExecutor(64) as pool:
        assert all(pool.map(episode, range(64)))


# ---- Limits ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Greedy:
    """A program that takes too much of something."""

    statuses: str  # those that are right
    code: str
    text: str = ""  # must be in the output
    limits: dict = field(default_factory=dict)  # other than the sandbox's


# Processes share most of their memory, but the limit of memory counts it once for each: it must not be over first.
ROOMY = dict(memory=8 << 30)
GREEDY = {
    "one block of memory": Greedy("error", "b = bytearray(32 << 30)", "MemoryError"),
    "memory bit by bit": Greedy("error", "l = []\nwhile True: l.append(bytearray(10 << 20))", "MemoryError"),
    "memory of a list": Greedy("error", "l = [0]\nwhile True: l = l + l", "MemoryError"),
    "memory of several": Greedy(
        "memory",
        """
import os, time

for _ in range(6):
    if os.fork() == 0:
        block = bytearray(150 << 20)
        for k in range(0, len(block), 4096):
            block[k] = 1
        time.sleep(1000)
time.sleep(1000)
""",
    ),
    "fork bomb": Greedy(
        "processes",
        """
import os

while True:
    try:
        os.fork()
    except OSError:
        pass
""",
        limits=ROOMY,
    ),
    "sleeping processes": Greedy(
        "processes",
        """
import os, time

for _ in range(400):
    if os.fork() == 0:
        time.sleep(1000)
time.sleep(1000)
""",
        limits=ROOMY,
    ),
    "chain of processes": Greedy(
        "processes",
        """
import os, time

for _ in range(1500):
    if os.fork():
        time.sleep(1000)
""",
        limits=ROOMY,
    ),
    "one big file": Greedy("error disk", "f = open('big', 'wb')\nwhile True: f.write(b'x' * 1000000)"),
    "many big files": Greedy("disk", "for i in range(99): open(f'b{i}', 'wb').write(b'x' * 3000000)"),
    "unlinked open files": Greedy(
        "disk",
        """
import os, time

files = []
for _ in range(200):
    files.append(open("x", "wb"))
    os.unlink("x")
    files[-1].write(b"x" * 3000000)
    files[-1].flush()
    time.sleep(0.01)
""",
    ),
    "many small files": Greedy("disk", "for i in range(10**6): open(f'f{i}', 'w')"),
    "deep folders": Greedy("disk", "import os\nfor i in range(3000): os.mkdir('d'); os.chdir('d')"),
    "long paths": Greedy("disk", "import os\nfor i in range(99): os.mkdir('d' * 99); os.chdir('d' * 99)"),
    "hidden files": Greedy(
        "disk",
        """
import os

os.mkdir("d", 0o300)
for i in range(99):
    open(f"d/{i}", "wb").write(b"x" * 3000000)
""",
    ),
    "endless print": Greedy("flood", "while True: print('x' * 1000)", "xxx"),
    "endless write": Greedy("flood", "import os\nwhile True: os.write(2, b'y' * 1000000)", "yyy"),
    "recursion": Greedy(
        "error killed memory timeout",
        """
import sys

sys.setrecursionlimit(10**9)
def f():
    f()
f()
""",
        limits=dict(timeout=1.0),
    ),
}


@pytest.mark.parametrize("name", GREEDY)
def test_greedy_programs(sandbox, workspace, name):
    """A program that takes all it can get is ended by the limit that it is over, and the host stays small."""
    greedy = GREEDY[name]
    before = resident()
    result = sandbox.run(greedy.code, workspace, **greedy.limits)
    assert result.status in greedy.statuses.split() and greedy.text in result.output, result
    assert len(result.output) < 33_000
    if result.status in ("processes", "flood"):
        assert result.seconds < 10  # within 1 s on a machine with nothing else to do
    used = sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in os.scandir(workspace))
    assert used < 400 * MB and not left(sandbox)
    assert resident() - before < 20 * MB


def test_flood_ends_the_run(sandbox, workspace):
    """A program that prints too much is ended then, not at its time limit, and the start of it is kept."""
    result = sandbox.run("import time; print('first', 'x' * 99_000); time.sleep(1000)", workspace, flood=50_000)
    assert (result.status, result.code) == ("flood", None) and result.output.startswith("first x")
    assert result.seconds < LONG / 2


def test_a_full_workspace_stays_full(sandbox, workspace):
    """The quota counts what earlier actions left: later runs answer `disk` too, so that the episode can be ended."""
    sandbox.run("for i in range(20): open(f'b{i}', 'wb').write(b'x' * 3000000)", workspace)
    assert sandbox.run("pass", workspace).status == "disk"


ODD = [
    "import os; os.makedirs('a/b/c'); open('a/b/c/f', 'w'); os.mkdir('a/b/d', 0)",
    "import shutil, os; w = os.getcwd(); os.chdir('/'); shutil.rmtree(w, ignore_errors=True)",
    "import os; os.symlink('/', 'root'); os.symlink('.', 'loop'); os.mkfifo('pipe'); open('-rf', 'w')",
    "import os; [open('n' + chr(0xdc80 + i) + '\\n', 'w') for i in range(9)]",
]


@pytest.mark.parametrize("code", ODD)
def test_odd_workspaces_are_removed(sandbox, workspace, code):
    """Folders without rights, loops, names that are no text: the fixture checks that remove_workspace copes."""
    assert sandbox.run(code, workspace).status in ("ok", "disk")


@pytest.mark.parametrize("failure", ["nothing is removed", "Ctrl-C before", "Ctrl-C after"])
def test_a_workspace_is_known_as_long_as_it_exists(sandbox, monkeypatch, failure):
    """A workspace whose removal failed was forgotten and left on the disk for ever: close() must find it again."""
    path = sandbox.make_workspace()
    really_run = subprocess.run

    def run(command, **options):
        if failure == "Ctrl-C after":
            really_run(command, **options)
        if failure != "nothing is removed":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", run)
        try:
            sandbox.remove_workspace(path)
        except KeyboardInterrupt:
            assert "Ctrl-C" in failure
    assert (path in sandbox.workspaces) == os.path.exists(path)
    sandbox.remove_workspace(path)
    assert path not in sandbox.workspaces and not os.path.exists(path)


@pytest.mark.parametrize("place", ["full", "missing"])
def test_no_room_for_a_workspace(sandbox, monkeypatch, tmp_path, place):
    """A full disk is our failure, and says where: not an OSError that no caller expects."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / place))
    if place == "full":
        (tmp_path / place).mkdir()
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(SandboxError, match=f"no room for a workspace in {re.escape(str(tmp_path / place))}: "):
            sandbox.make_workspace({"small": b"x", "big": b"x" * 2000})
    finally:
        if place == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    for path in [path for path in sandbox.workspaces if path.startswith(str(tmp_path))]:  # still known, for close()
        sandbox.remove_workspace(path)


# ---- Honest accounts -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ending:
    """A program and the account that must be given of it."""

    code: str
    status: str
    exit_code: int
    texts: tuple = ()  # must be in the output


ENDINGS = {
    "silence": Ending("pass", "ok", 0),
    "exception": Ending("def f(x):\n    return 1 / x\nf(0)", "error", 1, ("Traceback", "return 1 / x", "ZeroDiv")),
    "syntax error": Ending("print('x'\nfoo bar", "error", 1, ("SyntaxError", "print('x'")),
    "null byte": Ending("x = 1\0", "error", 1, ("null bytes",)),
    "half a character": Ending("x = '\ud800'", "error", 1, ("UnicodeEncodeError",)),
    "exit code": Ending("import sys; sys.exit(3)", "error", 3),
    "exit text": Ending("import sys; sys.exit('bye')", "error", 1, ("bye",)),
    "exit": Ending("import sys; print('x'); sys.exit()", "ok", 0, ("x",)),
    "_exit": Ending("import os; print('x'); os._exit(0)", "ok", 0, ("x",)),
    "segfault": Ending("import ctypes; ctypes.string_at(0)", "killed", -11),
    "killed": Ending("import os; os.kill(os.getpid(), 9)", "killed", -9),
    "group killed": Ending("import os; os.killpg(0, 15)", "killed", -15),
    "abort": Ending("import os; os.abort()", "killed", -6),
    "no input": Ending("input()", "error", 1, ("EOFError",)),
    "odd bytes": Ending("import os; os.write(1, bytes(range(256))); print('\\ud800 ')", "ok", 0, ("\ufffd", "? ")),
    "order": Ending("import sys; print('a'); print('b', file=sys.stderr); print('c')", "ok", 0, ("a\nb\nc\n",)),
    "unfinished line": Ending("print('x', end='')", "ok", 0, ("x",)),
    "at exit": Ending("import atexit; atexit.register(print, 'last')", "ok", 0, ("last",)),
    "thread": Ending("import threading; threading.Thread(target=print, args=('late',)).start()", "ok", 0, ("late",)),
    "streams closed": Ending("import sys; sys.stdout.close(); sys.stderr = None; 1 / 0", "error", 1, ("ZeroDiv",)),
    "main": Ending("import __main__, sys; print(__name__, __main__.sys is sys)", "ok", 0, ("__main__ True",)),
    "long": Ending("for i in range(50000): print(i)\n1 / 0", "error", 1, ("0\n1\n2\n", "bytes cut", "ZeroDiv")),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_account(sandbox, workspace, name):
    """What a program did is told as it was: its ending, its code, its output in order, its own lines in tracebacks."""
    skip_without_signals(name)
    expected = ENDINGS[name]
    result = sandbox.run(expected.code, workspace)
    assert isinstance(result, Result)
    assert (result.status, result.code) == (expected.status, expected.exit_code), result
    assert all(text in result.output for text in expected.texts), result
    assert 0 < result.seconds < LONG and HERE not in result.output


@pytest.mark.parametrize("pieces", [["a" * 5, "b" * 5], ["abcdefghij" * 3], ["x"] * 23, ["", "abc"]])
def test_output_keeps_head_and_tail(sandbox, workspace, pieces):
    """The exception stands at the end: cutting off the tail hid it, keeping everything filled the memory."""
    code = f"import os\nfor piece in {pieces}: os.write(1, piece.encode())"
    whole = "".join(pieces)
    cut = len(whole) - 20
    expected = whole if cut <= 0 else f"{whole[:10]}\n... {cut} bytes cut ...\n{whole[-10:]}"
    assert sandbox.run(code, workspace, output=20).output == expected


def test_output_of_any_bytes(sandbox, workspace):
    """The output is what was written: whatever the bytes, only what is no UTF-8 is replaced."""
    draw = random.Random(0)
    for _ in range(30):
        written = random_bytes(draw, draw.choice([0, 1, 50, 400, 401, 5000]))
        result = sandbox.run(f"import os; os.write(1, {written!r})", workspace, output=400)
        kept = written
        if len(written) > 400:
            kept = written[:200] + f"\n... {len(written) - 400} bytes cut ...\n".encode() + written[-200:]
        assert (result.status, result.code) == ("ok", 0) and result.output == kept.decode("utf-8", "replace")


@pytest.mark.parametrize("flag", ["O_DIRECT", "O_NONBLOCK", "O_APPEND", "O_ASYNC", "O_NOATIME"])
def test_flags_of_the_output_are_reset(sandbox, workspace, flag):
    """The program's standard output is the supervisor's log: with O_DIRECT on it, no read of the log succeeded."""
    code = f"""
import fcntl, os

print('before', flush=True)
try:
    fcntl.fcntl(1, fcntl.F_SETFL, fcntl.fcntl(1, fcntl.F_GETFL) | os.{flag})
except OSError:  # not every file system has every flag
    pass
"""
    result = sandbox.run(code, workspace)
    assert (result.status, result.output) == ("ok", "before\n")


def test_files_stay_and_shadow_nothing(sandbox, workspace):
    """Agents hand files on; a json.py or sitecustomize.py that one leaves must not become part of the next run."""
    write = """
for name in ("json", "sitecustomize", "random"):
    open(name + ".py", "w").write("print('EVIL')")
open("helper.py", "w").write("x = 7")
"""
    use = """
import sys

for name in ("json", "random"):
    sys.modules.pop(name, None)
import json, random, helper

print(helper.x, open("train.csv").read())
"""
    assert sandbox.run(write, workspace).status == "ok"
    assert sandbox.run(use, workspace).output == "7 a,b\n1,2\n\n"


def test_a_pickle_is_opened_inside_only(sandbox, workspace):
    """Reading a pickle runs what its author wants: in another program that is harmless, in the host it would not be."""
    write = """
import os, pickle

class Evil:
    def __reduce__(self):
        return os.system, ("echo pickled; touch /tmp/evil",)

pickle.dump(Evil(), open("model.pkl", "wb"))
"""
    assert sandbox.run(write, workspace).status == "ok"
    assert "pickled" in sandbox.run("import pickle; pickle.load(open('model.pkl', 'rb'))", workspace).output
    assert not os.path.exists("/tmp/evil")


UNREADABLE = [
    "import os; os.symlink({truth!r}, 'submission.csv')",
    "import os; os.symlink('train.csv', 'submission.csv')",
    "import os; os.link('train.csv', 'submission.csv')",
    "import os; os.mkfifo('submission.csv')",
    "import os; os.mkdir('submission.csv')",
    "open('submission.csv', 'wb').write(b'x' * 2000)",
    "open('submission.csv', 'wb').truncate(20 << 20)",
    "pass",
]


@pytest.mark.parametrize("code", UNREADABLE)
def test_read_refuses(sandbox, host, workspace, code):
    """A link to the answers got full marks, a pipe hung the trainer, a sparse file of a terabyte filled its memory."""
    assert sandbox.run(code.format(**host.names), workspace).status == "ok"
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError):
        Sandbox.read(workspace, "submission.csv", most=1000)
    assert len(os.listdir("/proc/self/fd")) <= descriptors  # a long training must not run out of them


def test_read_takes_plain_files_only_by_name(sandbox, host, workspace):
    """A name with a path leads out of the workspace; hard links to the host's files, and folders, are refused."""
    os.link(host.truth, os.path.join(workspace, "linked.csv"))
    outside = ["../" + os.path.basename(host.other) + "/secret.csv", str(host.truth)]
    for name in [*outside, "", ".", "..", "a/b", "x\0", "\ud800", "n" * 300, "linked.csv"]:
        with pytest.raises(OSError):
            Sandbox.read(workspace, name)
    os.unlink(os.path.join(workspace, "linked.csv"))
    assert Sandbox.read(workspace, "train.csv", most=8) == b"a,b\n1,2\n"


# ---- Lists of files --------------------------------------------------------------------------------------------------

# Pieces that parsers of text and tables stumble over.
PIECES = [b"\n", b"\r", b"\r\n", b"\n\r", b"\0", b",", b'"', b"'", b" ", b"\t", b"\xef\xbb\xbf", b"\xff\xfe", b"\x1a"]
PIECES += [b"\x1c", b"\xc2\x85", b"\xe2\x80\xa8", b"\xed\xa0\x80", b"\x80", b"a,b", b'"a,b"', b"\\"]


def random_bytes(draw, most):
    """At most so many bytes: of all kinds, or of pieces that are special."""
    if draw.random() < 0.3:
        return draw.randbytes(draw.randint(0, most))
    return b"".join(draw.choices(PIECES, k=draw.randint(0, most)))[:most]


def write_bytes(workspace, name, data):
    """Write a file whose name need not be text."""
    with open(os.path.join(os.fsencode(workspace), name), "wb") as file:
        file.write(data)


def test_shapes_of_honest_tables(sandbox):
    """Files of Unix, Windows and old Macs, with or without a last line end: rows without the header, and columns."""
    draw = random.Random(1)
    workspace = sandbox.make_workspace()
    expected = []
    for number in range(48):
        rows, columns = draw.randint(0, 30), draw.randint(1, 9)
        line = ",".join(draw.choices(["x", "1.5", '"a, b"', '"say ""so"""', "é"], k=columns))
        line_end = ["\n", "\r\n", "\r"][number % 3]
        text = line_end.join([line] * (rows + 1)) + line_end * draw.randint(0, 1)
        name = f"{number:02}.csv"
        write_bytes(workspace, name.encode(), text.encode())
        expected.append(FileEntry(name, len(text.encode()), f"{rows} x {columns}"))
    assert sandbox.list_files(workspace) == tuple(expected)
    sandbox.remove_workspace(workspace)


@pytest.mark.parametrize("seed", range(20))
def test_any_workspace_can_be_listed(sandbox, seed):
    """A carriage return in the first line of a CSV ended a training: the listing takes any bytes and any names."""
    draw = random.Random(seed)
    workspace = sandbox.make_workspace()
    printable = {}
    for number in range(40):
        ending = draw.choice([b".csv", b".csv", b".CSV", b"", b".csv\n"])
        odd = random_bytes(draw, 60).replace(b"\0", b"").replace(b"/", b"") if draw.random() < 0.5 else b""
        name = b"%02d" % number + odd + ending
        data = random_bytes(draw, draw.choice([0, 3, 40, 3000]))
        data = draw.choice([b"", b"", b"", b'"' + b"x" * 200_000, b"x" * 200_000, b"," * 200_000]) + data
        write_bytes(workspace, name, data)
        if os.fsdecode(name).isprintable():
            printable[os.fsdecode(name)] = len(data)
    Path(workspace, "sparse.csv").touch()
    os.truncate(Path(workspace, "sparse.csv"), 20 << 20)
    os.mkdir(Path(workspace, "folder.csv"))
    os.mkfifo(Path(workspace, "pipe.csv"))
    os.symlink("/etc/passwd", Path(workspace, "link.csv"))
    files = sandbox.list_files(workspace)
    assert [(file.name, file.size) for file in files[:-1]] == sorted(printable.items())
    assert files[-1].name == "sparse.csv" and files[-1].size == 20 << 20
    for file in files:
        assert re.fullmatch(r"(\d+ x \d+)?", file.shape), file
        assert file.name.endswith(".csv") or file.shape == ""
    sandbox.remove_workspace(workspace)


def test_a_listing_reads_a_bounded_number_of_bytes(sandbox, workspace, monkeypatch):
    """50 sparse files of 64 MB each took 12 seconds to list, and no other thread of the trainer could run meanwhile."""
    taken = []
    really_read = Sandbox.read

    def read(*args):
        taken.append(len(really_read(*args)))
        return really_read(*args)

    code = "for i in range(60): open(f'{i:02}.csv', 'wb').truncate((64 if i % 2 else 5) << 20)"
    assert sandbox.run(code, workspace, disk=512 << 20).status == "ok"
    monkeypatch.setattr(Sandbox, "read", staticmethod(read))
    files = sandbox.list_files(workspace)
    assert sum(taken) == 6 * (5 << 20)  # the seventh would be over 32 MB
    assert [file.name for file in files if file.shape] == [f"{i:02}.csv" for i in range(0, 12, 2)]
    assert len(files) == 61


def test_workspaces_that_cannot_be_listed(sandbox):
    """What a program locked or removed is an empty list."""
    gone = sandbox.make_workspace()
    os.rmdir(gone)
    assert sandbox.list_files(gone) == ()
    sandbox.remove_workspace(gone)


def test_cores_are_a_choice(sandbox):
    """Several processes train on one machine: each runs its agents' programs on cores of its own."""
    core = max(os.sched_getaffinity(0))
    with Sandbox(cores=[core]) as one:
        result = one.run("import os; print(os.sched_getaffinity(0))", one.make_workspace())
    assert result.output == f"{{{core}}}\n"


def test_limits_of_one_run_and_privacy(sandbox, workspace):
    """A mistyped limit would be no limit; other users' programs must not look into a workspace."""
    with pytest.raises(TypeError):
        sandbox.run("pass", workspace, time_out=1)
    assert stat.S_IMODE(os.stat(workspace).st_mode) == 0o700


# ---- Levels ----------------------------------------------------------------------------------------------------------


def test_levels(capfd):
    """The level never weakens in silence: the one that cannot be had is refused, the weak one is printed."""
    if os.geteuid() == 0:
        with pytest.raises(InputError, match="root"):
            Sandbox("limits")
        return
    with Sandbox("limits") as weak:
        workspace = weak.make_workspace()
        assert capfd.readouterr().err.count("WARNING") == 1
        assert weak.run("print(1)", workspace).output == "1\n"
        assert weak.run("while True: pass", workspace, timeout=0.5).status == "timeout"
        assert weak.run("while True: print('x' * 1000)", workspace).status == "flood"


@pytest.mark.parametrize("level", ["nonsense", "", None, "Landlock", "limit"])
def test_unknown_levels_are_refused(level):
    """A level that is mistyped must not be taken for one that exists."""
    with pytest.raises(InputError, match="there is no sandbox level"):
        Sandbox(level)


def test_limits_level_is_printed(sandbox):
    """The weak level says so on standard error, and works for an ordinary user (where the tests run as root)."""
    if sandbox.user is None:
        pytest.skip("needs root and a Python that other users can read")
    code = "with Sandbox('limits') as s: print(s.run('print(1)', s.make_workspace()).output)"
    other = script(code, user=1000, group=1000, extra_groups=[], cwd="/")
    out, err = other.communicate()
    assert out == "1\n\n" and err.count("\n") == 1 and "WITHOUT isolation" in err


@dataclass(frozen=True)
class BrokenKernel:
    """What a kernel, or a container's filter, may answer to some calls."""

    error: int
    calls: tuple  # numbers on x86_64


PRCTL = 157  # on x86_64; the others have the same number everywhere
BROKEN_KERNELS = {
    "no Landlock": BrokenKernel(38, (444,)),
    "Landlock only pretends": BrokenKernel(0, (444, 445, 446)),
    "no more seccomp and prctl": BrokenKernel(1, (PRCTL,)),
}


@pytest.mark.parametrize("name", BROKEN_KERNELS)
def test_failed_lockdown_runs_nothing(sandbox, name):
    """Where a step of the lockdown fails or is skipped in silence, no program runs, and the message says what to do."""
    broken = BROKEN_KERNELS[name]
    calls = [167 if call == PRCTL and os.uname().machine != "x86_64" else call for call in broken.calls]
    code = f"""
# A filter that answers some calls with an error.
steps = [instruction(LOAD, CALL_NUMBER)]
for call in {calls}:
    steps += if_call(call, FAIL + {broken.error})
steps += [instruction(RETURN, ALLOW)]
filter_code = ctypes.create_string_buffer(b"".join(steps))
kernel("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
kernel("prctl", PR_SET_SECCOMP, 2, struct.pack("HxxxxxxP", len(steps), ctypes.addressof(filter_code)), 0, 0)

# The probe finds out.
try:
    Sandbox()
except InputError as error:
    print(error)

# Even without the probe no program runs.
really_run = Sandbox.run
Sandbox.run = lambda *_: Result("ok", "", 0, 0.0)
with Sandbox() as sandbox:
    Sandbox.run = really_run
    workspace = sandbox.make_workspace()
    try:
        print(sandbox.run("open('ran', 'w'); open({HERE + "/agents.py"!r})", workspace))
    except SandboxError:
        print("raised")
    print(os.listdir(workspace))
"""
    out, err = script(code).communicate()
    lines = out.splitlines()
    assert "no isolation here" in lines[0] and "--sandbox limits" in lines[0], out + err
    if name != "Landlock only pretends":  # which only the probe can tell
        assert lines[1:] == ["raised", "[]"], out + err


def test_closed(workspace):
    """A closed sandbox runs nothing more, removes its workspaces, and may be closed again."""
    with Sandbox() as short:
        path = short.make_workspace({"a": b"1"})
        process = short.process
    assert not os.path.exists(path) and process.returncode is not None
    short.close()
    with pytest.raises(SandboxError, match="closed"):
        short.run("pass", path)


# ---- Honest programs -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Honest:
    """A program that must work as outside."""

    text: str  # must be in the output
    code: str
    needs: str = ""  # modules


DATA = """
import numpy as np, pandas as pd, os

X = np.random.default_rng(0).normal(size=(500, 8))
y = (X[:, 0] > 0).astype(int)
"""
HONEST = {
    "files": Honest(
        "['c', 'f', 'train.csv']",
        """
import csv, shutil, os

print(list(csv.reader(open('train.csv'))))
shutil.copy2('train.csv', 'b')
shutil.move('b', 'c')
os.makedirs('d/e')
shutil.copytree('d', 'f')
shutil.rmtree('d')
print(sorted(os.listdir('.')))
""",
    ),
    "tempfile": Honest(
        "True",
        """
import tempfile, os

tempfile.NamedTemporaryFile().write(b'x')
with tempfile.TemporaryDirectory() as folder:
    print(folder.startswith(os.getcwd()))
""",
    ),
    "subprocess": Honest(
        "2\n\ntrain.csv\nagent",
        """
import subprocess, sys

print(subprocess.run([sys.executable, '-c', 'print(1 + 1)'], capture_output=True, text=True).stdout)
print(subprocess.getoutput('ls; echo $USER'))
""",
    ),
    "child ended": Honest(
        "-15",
        """
import subprocess

process = subprocess.Popen(['sleep', '1000'])
process.terminate()
print(process.wait())
""",
    ),
    "sqlite": Honest(
        "[(0,)]",
        """
import sqlite3

connection = sqlite3.connect('a.db')
connection.execute('create table t(x)')
connection.commit()
print(connection.execute('select count(*) from t').fetchall())
""",
    ),
    "asyncio": Honest(
        "5",
        """
import asyncio

async def five():
    await asyncio.sleep(0.01)
    return 5

print(asyncio.run(five()))
""",
    ),
    "threads": Honest(
        "[0, 1, 4, 9]",
        """
from concurrent.futures import ThreadPoolExecutor

with ThreadPoolExecutor(4) as pool:
    print(list(pool.map(lambda x: x * x, range(4))))
""",
    ),
    "pickle of a class": Honest(
        "__main__.M",
        """
import pickle

class M:
    pass

pickle.dump(M(), open('m', 'wb'))
print(type(pickle.load(open('m', 'rb'))))
""",
    ),
    "dataclass": Honest(
        "A(x=1)",
        """
from dataclasses import dataclass

@dataclass
class A:
    x: int = 1

print(A())
""",
    ),
    "user and time": Honest(
        "agent True",
        """
import os, getpass, datetime, zoneinfo

print(datetime.datetime.now(), getpass.getuser(), os.path.expanduser('~') == os.getcwd())
""",
    ),
    "warning": Honest("careful", "import warnings; warnings.warn('careful')"),
    "numpy": Honest(
        "(200,)",
        """
import numpy as np

print(np.linalg.svd(np.random.rand(200, 200))[1].shape)
""",
        needs="numpy",
    ),
    "read_csv": Honest("3", "import pandas as pd; print(pd.read_csv('train.csv').sum().sum())", needs="pandas"),
    "formats": Honest(
        "(500, 8) (500, 8)",
        DATA
        + """
import joblib

table = pd.DataFrame(X)
table.to_csv('x.csv', index=False)
joblib.dump(table, 'm')
print(pd.read_csv('x.csv').shape, joblib.load('m').shape)
""",
        needs="pandas sklearn",
    ),
    "time zones": Honest(
        "+01:00",
        """
import pandas as pd

print(pd.Timestamp('2024-01-01', tz='Europe/Berlin'))
""",
        needs="pandas",
    ),
    "fit, pickle, reload": Honest(
        "True",
        DATA
        + """
import pickle
from sklearn.ensemble import RandomForestClassifier

pickle.dump(RandomForestClassifier(10, n_jobs=-1).fit(X, y), open('m.pkl', 'wb'))
print(pickle.load(open('m.pkl', 'rb')).score(X, y) > 0.9)
""",
        needs="pandas sklearn",
    ),
    "grid search": Honest(
        "True",
        DATA
        + """
from sklearn.model_selection import GridSearchCV
from sklearn.svm import SVC

print(GridSearchCV(SVC(), {'C': [0.1, 1]}, n_jobs=-1, cv=3).fit(X, y).best_score_ > 0.8)
""",
        needs="pandas sklearn",
    ),
    "cross validation": Honest(
        "(5,)",
        DATA
        + """
from sklearn.model_selection import cross_val_score
from sklearn.linear_model import LogisticRegression

print(cross_val_score(LogisticRegression(), X, y, n_jobs=2).shape)
""",
        needs="pandas sklearn",
    ),
    "boosting": Honest(
        "True",
        DATA
        + """
from sklearn.ensemble import HistGradientBoostingClassifier

print(HistGradientBoostingClassifier(max_iter=5).fit(X, y).score(X, y) > 0.8)
""",
        needs="pandas sklearn",
    ),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_programs(sandbox, workspace, name):
    """A sandbox in which ordinary programs fail teaches an agent nothing: each of these works as outside."""
    skip_without_signals(name)
    honest = HONEST[name]
    missing = [module for module in honest.needs.split() if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}")
    result = sandbox.run(honest.code, workspace, timeout=10 * LONG, memory=4 << 30)
    assert result.status == "ok" and honest.text in result.output, result


def test_preload(sandbox):
    """Forks of one zygote drew the same random numbers; imports are made once; a missing module is no error."""
    code = "import random, sys; print(random.random(), 'json' in sys.modules)"
    if importlib.util.find_spec("numpy") is not None:
        code += "\nprint('numpy' in sys.modules); import numpy; print(numpy.random.rand())"
    with Sandbox(preload=["numpy", "no_such_module"]) as made:
        workspace = made.make_workspace()
        first = made.run(code, workspace).output
        second = made.run(code, workspace).output
    assert len(set(first.split()) & set(second.split())) == 1 and first != second and "True" in first


def test_bare_programs_are_quick(sandbox, workspace):
    """A fork and the lockdown take about 10 ms; a new interpreter with its imports would take hundreds."""
    times = [sandbox.run("pass", workspace).seconds for _ in range(10)]
    assert min(times) < 1  # 0.1 s on a machine with nothing else to do
    assert Limits().timeout == 30
