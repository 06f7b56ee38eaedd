"""The sandbox under attack: what a program must not reach, what must not survive it, what must still work.

FAULT 36 and what else an exploring policy does. Symptom: the trainer hangs, zombies pile up, or a time limit by signals
does nothing outside the main thread. Guard: processes apart, ended by descent, from any thread. Every attack is run for
real, so the whole file skips where the kernel has no Landlock.
"""
import ctypes
import importlib.util
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import agents
from agents import InputError, Limits, Result, Sandbox, SandboxError, descendants

HERE = os.path.dirname(os.path.abspath(agents.__file__))
MB = 1 << 20
KEY = "sk-SECRET-12345"
PLACES = ("/tmp", "/var/tmp", "/dev/shm", "/etc", "/home", "/root")
TRUTH = "id,y\n1,GROUNDTRUTH\n"

# Put before the attacks of a table. attempt() tells apart a refusal (OSError), a success, and an attack that
# is broken itself: any other exception ends the program with status error, which fails the test.
TOOLS = '''
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
'''


class Host:
    """What the trainer's side has to lose: answers, a project, a key, servers, and a count of what
    reached it.
    """

    def __init__(self, sandbox):
        self.folder = Path(tempfile.mkdtemp(prefix="host-"))
        self.truth, self.project = self.folder / "answers.csv", self.folder / "train.py"
        self.truth.write_text(TRUTH)
        self.project.write_text("original")
        for path in (self.folder, self.truth, self.project):    # open to all: only the sandbox is in the way
            path.chmod(0o777)
        self.reached = []
        signal.signal(signal.SIGUSR1, lambda *_: self.reached.append("signal"))
        self.tcp = self._server(socket.AF_INET, ("127.0.0.1", 0))
        self.unix = self._server(socket.AF_UNIX, str(self.folder / "socket"))
        (self.folder / "socket").chmod(0o777)
        self.abstract = self._server(socket.AF_UNIX, f"\0sandbox-test-{os.getpid()}")
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.other = sandbox.make_workspace({"secret.csv": TRUTH.encode()})
        self.names = dict(
            truth=str(self.truth), project=str(self.project), folder=str(self.folder), other=self.other,
            unix=str(self.folder / "socket"), abstract=f"sandbox-test-{os.getpid()}", here=HERE,
            tcp=self.tcp.getsockname()[1], udp=self.udp.getsockname()[1], host=os.getpid(),
            zygote=sandbox.process.pid, clone=56 if os.uname().machine == "x86_64" else 220,
            packages=[p for p in sys.path if p.endswith("site-packages")][0])

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
        assert self.truth.read_text() == TRUTH and self.project.read_text() == "original"
        assert stat.S_IMODE(self.project.stat().st_mode) == 0o777 and self.project.stat().st_nlink == 1
        assert sorted(os.listdir(self.folder)) == ["answers.csv", "socket", "train.py"]
        assert os.listdir(self.other) == ["secret.csv"]
        assert self.reached == []
        return True


def landlock_version():
    return ctypes.CDLL(None).syscall(agents.LANDLOCK_CREATE, None, 0, 1) if agents.LINUX else 0


def skip_without_signals(name):
    """Before version 6 Landlock lets signals through, so that a program is refused them even to itself."""
    if name in ("stops itself", "killed", "group killed", "abort", "child ended") and landlock_version() < 6:
        pytest.skip(f"Landlock {landlock_version()} doesn't confine signals: programs can't send any")


def left(sandbox):
    """Processes that outlived the run that just returned (its supervisor, which is ours, may take a
    moment).
    """
    zygote = sandbox.process.pid
    parent = lambda pid: int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    below = []
    for pid in descendants(zygote):
        try:
            below += [pid] if parent(pid) != zygote else []
        except OSError:
            pass
    deadline = time.monotonic() + 0.5
    while not below and descendants(zygote) and time.monotonic() < deadline:
        time.sleep(0.005)
    return below or descendants(zygote)


@pytest.fixture(scope="module")
def sandbox():
    # Asked of the kernel, not of Sandbox: a lockdown that fails must fail the tests, not skip them.
    if landlock_version() < 1:
        pytest.skip("this kernel has no Landlock (Linux >= 5.13)")
    os.environ["JUDGE_API_KEY"] = KEY
    with Sandbox(timeout=2.0, memory=512 * MB, disk=32 * MB) as made:
        yield made


@pytest.fixture(scope="module")
def host(sandbox):
    made = Host(sandbox)
    yield made
    subprocess.run(["rm", "-rf", str(made.folder)])


@pytest.fixture
def workspace(sandbox):
    path = sandbox.make_workspace({"train.csv": b"a,b\n1,2\n"})
    yield path
    sandbox.remove_workspace(path)
    assert not os.path.exists(path)


# ---------------------------------------------------------------- attacks in tables

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
    "look around": [f"os.listdir({path!r})" for path in ("/", *PLACES, "/var", "/proc", "/dev")] + [
        "os.listdir({here!r})", "open({here!r} + '/agents.py').read()", "open('/etc/shadow').read()",
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
    ] + [f"open('{place}/evil', 'w')" for place in PLACES],
    "another episode's workspace": [
        "os.listdir({other!r})", "open({other!r} + '/secret.csv').read()", "open({other!r} + '/mine', 'w')",
        "os.unlink({other!r} + '/secret.csv')", "os.rmdir({other!r})",
        "os.rename('train.csv', {other!r} + '/mine')",
    ],
    "other processes' memory": [
        f"open('/proc/{pid}/{file}', 'rb').read(1)" for pid in ("{host}", "{zygote}", "1")
        for file in ("environ", "mem", "maps")] + [
        "os.listdir('/proc/{host}/fd')", "os.readlink('/proc/{host}/cwd')", "os.readlink('/proc/{host}/exe')",
        "open(f'/proc/{{os.getppid()}}/environ', 'rb').read(1)",
        "open(f'/proc/{{os.getppid()}}/mem', 'rb').read(1)", "call('ptrace', 16, {host}, 0, 0)",
        "call('ptrace', 16, os.getppid(), 0, 0)", "call('ptrace', 0, 0, 0, 0)",
        "call('process_vm_readv', {host}, 0, 0, 0, 0, 0)", "call(438, os.pidfd_open({host}), 1, 0)",
    ],
    "other processes' lives": [
        "os.kill({host}, signal.SIGUSR1)", "os.kill({zygote}, signal.SIGTERM)",
        "os.kill(os.getppid(), signal.SIGKILL)",
        "os.kill(1, 0)", "os.killpg(os.getpgid({host}), 0)", "os.kill(-1, 0) or os.kill({host}, 0)",
        "signal.pidfd_send_signal(os.pidfd_open({host}), signal.SIGUSR1)",
        "resource.prlimit({host}, resource.RLIMIT_CORE, (0, 0))",
        "os.setpriority(os.PRIO_PROCESS, {host}, 19)", "os.setpriority(os.PRIO_USER, 0, 19)",
        "os.sched_setaffinity({host}, [0])", "os.sched_setaffinity(0, [0, 1])",
        "os.sched_setscheduler({host}, os.SCHED_IDLE, os.sched_param(0))",
    ],
    "network": [
        "socket.create_connection(('127.0.0.1', {tcp}), 1)",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {udp}))",
        "socket.socket(socket.AF_UNIX).connect({unix!r})",
        "socket.socket(socket.AF_UNIX).connect(chr(0) + {abstract!r})",
        "socket.getaddrinfo('example.org', 80)",
    ] + ["socket.socket(%d, %d)" % kind for kind in ((10, 1), (16, 3), (17, 3), (40, 1), (2, 3))],
    "rights of root": [
        "os.setuid(0) if os.getuid() else os.chown('train.csv', 1, 1)", "os.chroot('.')",
        "os.mknod('disk', 0o600 | stat.S_IFBLK, os.makedev(254, 0))",
        "call('mount', b'x', b'.', b'tmpfs', 0, 0)", "call('mount', 0, b'/usr', 0, 32 | 4096, 0)",
        "call('umount2', b'/usr', 2)", "call('sethostname', os.uname().nodename.encode(), len(os.uname().nodename))", "open('/usr/bin/evil', 'w')",
    ] + [f"open('/dev/{device}', 'rb')" for device in ("vda", "sda", "mem", "kmsg", "kvm", "ptmx")] + [
        f"resource.prlimit(0, resource.RLIMIT_{name}, (-1, -1))" for name in ("AS", "CPU", "FSIZE", "CORE")],
    "new namespaces": [
        "call('unshare', 0x10000000)", "call('unshare', 0x10020000)", "call('setns', 0, 0)",
        "call({clone}, 0x10000000 | 17, 0, 0, 0, 0) or os._exit(0)",
    ],
    "memory that no limit counts": [
        "call('memfd_create', b'x', 0)", "call('shmget', 0, 300 << 20, 0o1666)", "call('msgget', 0, 0o1666)",
        "call('semget', 0, 1, 0o1666)",
        "call('prctl', 4, 0, 0, 0, 0)",     # not memory, but hides what a process writes
    ],
}


@pytest.mark.parametrize("name", ATTACKS)
def test_refused(sandbox, host, workspace, name):
    """An exploring program tries all that would reach the answers, the trainer or the system: each one is
    refused.
    """
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
    """A wrong number in the table would refuse some other call: with arguments of no sense each one gives
    EPERM.
    """
    number = agents.REFUSED[name][agents.MACHINES["linux " + os.uname().machine][0]]
    code = f"try: call({number}, -1, -1, -1, -1, -1)\nexcept OSError as error: print(error.errno)"
    result = sandbox.run(TOOLS + code, workspace)
    assert result.output == "1\n"


def test_changing_modes_is_pretended(sandbox, host, workspace):
    """chmod of the user's own files: Landlock doesn't look after it, and refusing it would break
    shutil.copy.
    """
    code = TOOLS + f"""
os.chmod({str(host.project)!r}, 0)
os.fchmod(os.open('train.csv', os.O_RDONLY), 0)
import shutil; shutil.copy('train.csv', 'copy.csv'); print(open('copy.csv').read())"""
    assert sandbox.run(code, workspace).status == "ok"
    assert host.untouched()


def test_the_key_is_nowhere(sandbox, workspace):
    """A clean environment was worthless while /proc/<parent>/environ could be read."""
    code = """
import os
print(dict(os.environ))
for pid in filter(str.isdigit, [*map(str, range(1, 5000)), str(os.getppid())]):
    for file in ("environ", "cmdline"):
        try: print(open(f"/proc/{pid}/{file}").read())
        except OSError: pass"""
    result = sandbox.run(code, workspace)
    assert result.status == "ok" and "HOME" in result.output and KEY not in result.output


def test_exec_gives_no_rights_back(sandbox, workspace):
    """Root that executes a program gets its capabilities back, and su is setuid, unless new privileges
    are given up.
    """
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
    code = "import os\nfor fd in range(3, 300):\n  try: os.write(fd, b'{}'); print('WROTE', fd)\n"
    result = sandbox.run(code + "  except OSError: pass\nprint(os.listdir('/proc/self/fd'))", workspace)
    assert result.output.strip() == "['0', '1', '2', '3']"      # 3 is the listing itself


# ---------------------------------------------------------------- ends and remains

ENDLESS = {
    "loop": "while True: pass",
    "ignores every signal": "import signal\nfor s in range(1, 65):\n  try: signal.signal(s, signal.SIG_IGN)\n"
                            "  except (OSError, ValueError): pass\nwhile True: pass",
    "stops itself": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "sleeps": "import time; time.sleep(100)",
    "thread": "import threading, time; threading.Thread(target=time.sleep, args=(100,)).start()",
    "at exit": "import atexit, time; atexit.register(time.sleep, 100)",
    "waits for a child": "import os, time\nif os.fork() == 0: time.sleep(100)\nos.wait()",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_programs_end(sandbox, workspace, name):
    """A program that never ends is ended at its limit, whatever it does with signals; its output is kept."""
    skip_without_signals(name)
    started = time.monotonic()
    result = sandbox.run("print('before')\n" + ENDLESS[name], workspace, timeout=0.3)
    assert result.status == "timeout" and result.code is None and result.output.startswith("before\n")
    assert time.monotonic() - started < 1.3 and 0.3 <= result.seconds < 1


BEAT = "    while True:\n        with open('beat', 'a') as f: f.write('x')\n        time.sleep(0.005)\n"
CLONE = ("import ctypes\ndef clone(flags):\n"
         "    return ctypes.CDLL(None).syscall(*map(ctypes.c_long, (56, flags, 0, 0, 0, 0)))\n")
DAEMONS = {
    "double fork": "if os.fork() == 0:\n    os.setsid()\n    if os.fork(): os._exit(0)\n"
                   "    os.closerange(0, 10)\n"
                   "    for s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\n" + BEAT,
    "holds the pipe": "if os.fork() == 0:\n    os.setsid()\n" + BEAT,
    "chain of forks": "if os.fork() == 0:\n    os.closerange(0, 10)\n    while True:\n"
                      "        if os.fork(): os._exit(0)\n        os.setsid()\n"
                      "        with open('beat', 'a') as f: f.write('x')\n",
    "two chains": "if os.fork() == 0:\n    os.fork()\n    while True:\n        if os.fork(): os._exit(0)\n"
                  "        with open('beat', 'a') as f: f.write('x')\n",
    "no death signal": CLONE + "if clone(0) == 0:\n" + BEAT,
    "sibling": CLONE + "if clone(0x8000) == 0:\n" + BEAT,
}


@pytest.mark.parametrize("name", DAEMONS)
def test_daemons_die_with_the_program(sandbox, workspace, name):
    """A double-forked daemon survived killpg and wrote into the next action's files; descent finds every
    one.
    """
    if "clone" in DAEMONS[name] and os.uname().machine != "x86_64":
        pytest.skip("the number of clone is that of x86_64")
    code = "import os, signal, time\n" + DAEMONS[name] + "time.sleep(0.15); print('done')"
    result = sandbox.run(code, workspace)
    size = os.path.getsize(os.path.join(workspace, "beat"))
    assert result.status == "ok" and "done" in result.output and result.seconds < 1
    assert size > 0 and not left(sandbox)
    time.sleep(0.1)
    assert os.path.getsize(os.path.join(workspace, "beat")) == size


def test_no_zombies(sandbox, workspace):
    """In a container the trainer is process 1 and inherits what nobody waits for: after 20 runs nothing
    is there.
    """
    code = "import os\nfor _ in range(5):\n  if os.fork() == 0:\n    os.fork(); os._exit(0)"
    assert {sandbox.run(code, workspace).status for _ in range(20)} == {"ok"}
    assert left(sandbox) == []
    states = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1] for pid in descendants(os.getpid())]
    assert not any(state.startswith(" Z") for state in states)


def script(code, **kinds):
    """Start another trainer that runs this code with the sandbox imported."""
    code = f"import os, sys, time\nsys.path.insert(0, {HERE!r})\nimport agents\nfrom agents import *\n" + code
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([sys.executable, "-c", code], **pipes, **kinds)


@pytest.mark.parametrize("end", ["kill -9", "close", "exit"])
def test_no_program_outlives_the_host(sandbox, end):
    """A killed training job left its programs running on the machine: the closed line ends them all."""
    beat = "import os, time\nopen('beat', 'w')\nif os.fork() == 0: os.setsid()\nwhile True: time.sleep(0.1)"
    code = f"""
import threading
sandbox = Sandbox(timeout=20)
workspace = sandbox.make_workspace()
threading.Thread(target=lambda: sandbox.run({beat!r}, workspace), daemon=True).start()
while not os.path.exists(workspace + "/beat"): time.sleep(0.01)
print(':'.join([workspace, *sandbox.workspaces]), sandbox.process.pid, *descendants(sandbox.process.pid), flush=True)
if {end!r} == "close":
    sandbox.close()
    print(*descendants(os.getpid()), flush=True)
if {end!r} != "exit": time.sleep(20)
"""
    other = script(code)
    workspaces, *pids = other.stdout.readline().split()
    assert len(pids) >= 3
    try:
        if end == "close":
            assert other.stdout.readline() == "\n"
        if end == "kill -9":
            other.kill()
        if end == "exit":
            other.wait(5)
        deadline = time.monotonic() + 2
        while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
        assert end == "kill -9" or not any(map(os.path.exists, workspaces.split(":")))
    finally:
        other.kill()
        other.communicate()
        subprocess.run(["rm", "-rf", *workspaces.split(":")])


def test_zygote_killed(sandbox, workspace):
    """The zygote may be killed (out of memory): the run in progress goes on, the next one starts another."""
    with ThreadPoolExecutor(1) as pool:
        code = "import time; open('on', 'w'); time.sleep(0.3); print('end')"
        running = pool.submit(sandbox.run, code, workspace)
        while not os.path.exists(os.path.join(workspace, "on")):
            time.sleep(0.01)
        sandbox.process.kill()
        time.sleep(0.05)
        assert sandbox.run("print('next')", workspace).output == "next\n"
        assert running.result().output == "end\n"


def test_supervisor_killed_is_retried(sandbox, workspace):
    """Our own failure says nothing about the program: it runs again, and counts only then."""
    code = ("import os, time\nif os.path.exists('twice'): print('second')\n"
            "else: open('twice', 'w'); time.sleep(9)")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(sandbox.run, code, workspace)
        while not os.path.exists(os.path.join(workspace, "twice")):
            time.sleep(0.01)
        supervisor, program = descendants(sandbox.process.pid)
        os.kill(supervisor, signal.SIGKILL)
        result = running.result()
    assert (result.status, result.output) == ("ok", "second\n")
    assert not os.path.exists(f"/proc/{program}")


def test_ctrl_c_gives_the_core_back(sandbox, workspace):
    """An interrupted run kept its core for ever: after a few the training stood still."""
    cores = sandbox.cores.qsize()
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        sandbox.run("while True: pass", workspace)
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


# ---------------------------------------------------------------- limits

GREEDY = {  # name: (code, statuses, text in the output)
    "one block of memory": ("b = bytearray(32 << 30)", "error", "MemoryError"),
    "memory bit by bit": ("l = []\nwhile True: l.append(bytearray(10 << 20))", "error", "MemoryError"),
    "memory of a list": ("l = [0]\nwhile True: l = l + l", "error", "MemoryError"),
    "memory of several": ("import os, time\nfor i in range(6):\n  if os.fork() == 0:\n"
                          "    b = bytearray(150 << 20)\n    for k in range(0, len(b), 4096): b[k] = 1\n"
                          "    time.sleep(9)\ntime.sleep(9)",
                          "memory", ""),
    "fork bomb": ("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", "processes", ""),
    "sleeping processes": ("import os, time\nfor i in range(400):\n  if os.fork() == 0: time.sleep(9)\n"
                           "time.sleep(9)", "processes", ""),
    "chain of processes": ("import os, time\nfor i in range(1500):\n  if os.fork(): time.sleep(9)",
                           "processes", ""),
    "one big file": ("f = open('big', 'wb')\nwhile True: f.write(b'x' * 1000000)", "error disk", ""),
    "many big files": ("for i in range(99): open(f'b{i}', 'wb').write(b'x' * 3000000)", "disk", ""),
    "unlinked open files": ("import os, time\nf = []\nfor i in range(200):\n"
                            "  f.append(open('x', 'wb')); os.unlink('x')\n  f[-1].write(b'x' * 3000000)\n"
                            "  f[-1].flush(); time.sleep(0.01)", "disk", ""),
    "many small files": ("for i in range(10**6): open(f'f{i}', 'w')", "disk", ""),
    "deep folders": ("import os\nfor i in range(3000): os.mkdir('d'); os.chdir('d')", "disk", ""),
    "long paths": ("import os\nfor i in range(99): os.mkdir('d' * 99); os.chdir('d' * 99)", "disk", ""),
    "hidden files": ("import os\nos.mkdir('d', 0o300)\n"
                     "for i in range(99): open(f'd/{i}', 'wb').write(b'x' * 3000000)", "disk", ""),
    "endless print": ("while True: print('x' * 1000)", "flood", "xxx"),
    "endless write": ("import os\nwhile True: os.write(2, b'y' * 1000000)", "flood", "yyy"),
    "recursion": ("import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
                  "error killed memory timeout", ""),
}


@pytest.mark.parametrize("name", GREEDY)
def test_greedy_programs(sandbox, workspace, name):
    """A program that takes all it can get is ended soon, by the limit it is over, and the host stays
    small.
    """
    code, statuses, text = GREEDY[name]
    before = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    started = time.monotonic()
    result = sandbox.run(code, workspace, timeout=1 if name == "recursion" else 2)
    assert result.status in statuses.split() and text in result.output, result
    assert len(result.output) < 33_000 and time.monotonic() - started < 3
    if result.status in ("processes", "flood"):
        assert result.seconds < 1
    used = sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in os.scandir(workspace))
    assert used < 400 * MB and not left(sandbox)
    assert int(Path("/proc/self/statm").read_text().split()[1]) * 4096 - before < 20 * MB


def test_flood_ends_the_run(sandbox, workspace):
    """A program that prints too much is ended then, not at its time limit, and the start of it is kept."""
    result = sandbox.run("import time; print('first', 'x' * 99_000); time.sleep(9)", workspace, flood=50_000)
    assert (result.status, result.code) == ("flood", None) and result.output.startswith("first x")
    assert result.seconds < 1


def test_a_full_workspace_stays_full(sandbox, workspace):
    """The quota counts what earlier actions left: later runs answer `disk` too, so that the episode can
    be ended.
    """
    sandbox.run("for i in range(20): open(f'b{i}', 'wb').write(b'x' * 3000000)", workspace)
    assert sandbox.run("pass", workspace).status == "disk"


@pytest.mark.parametrize("code", [
    "import os; os.makedirs('a/b/c'); open('a/b/c/f', 'w'); os.mkdir('a/b/d', 0)",
    "import shutil, os; w = os.getcwd(); os.chdir('/'); shutil.rmtree(w, ignore_errors=True)",
    "import os; os.symlink('/', 'root'); os.symlink('.', 'loop'); os.mkfifo('pipe'); open('-rf', 'w')",
    "import os; [open('n' + chr(0xdc80 + i) + '\\n', 'w') for i in range(9)]",
])
def test_odd_workspaces_are_removed(sandbox, workspace, code):
    """Folders without rights, loops, names that are no text: the fixture checks that remove_workspace
    copes.
    """
    assert sandbox.run(code, workspace).status in ("ok", "disk")


# ---------------------------------------------------------------- honest accounts

ENDINGS = {  # name: (code, status, exit code, texts in the output)
    "silence": ("pass", "ok", 0, []),
    "exception": ("def f(x):\n    return 1 / x\nf(0)", "error", 1, ["Traceback", "return 1 / x", "ZeroDiv"]),
    "syntax error": ("print('x'\nfoo bar", "error", 1, ["SyntaxError", "print('x'"]),
    "null byte": ("x = 1\0", "error", 1, ["null bytes"]),
    "half a character": ("x = '\ud800'", "error", 1, ["UnicodeEncodeError"]),
    "exit code": ("import sys; sys.exit(3)", "error", 3, []),
    "exit text": ("import sys; sys.exit('bye')", "error", 1, ["bye"]),
    "exit": ("import sys; print('x'); sys.exit()", "ok", 0, ["x"]),
    "_exit": ("import os; print('x'); os._exit(0)", "ok", 0, ["x"]),
    "segfault": ("import ctypes; ctypes.string_at(0)", "killed", -11, []),
    "killed": ("import os; os.kill(os.getpid(), 9)", "killed", -9, []),
    "group killed": ("import os; os.killpg(0, 15)", "killed", -15, []),
    "abort": ("import os; os.abort()", "killed", -6, []),
    "no input": ("input()", "error", 1, ["EOFError"]),
    "odd bytes": ("import os; os.write(1, bytes(range(256))); print('\\ud800 ')", "ok", 0, ["\ufffd", "? "]),
    "order": ("import sys; print('a'); print('b', file=sys.stderr); print('c')", "ok", 0, ["a\nb\nc\n"]),
    "unfinished line": ("print('x', end='')", "ok", 0, ["x"]),
    "at exit": ("import atexit; atexit.register(print, 'last')", "ok", 0, ["last"]),
    "thread": ("import threading; threading.Thread(target=print, args=('late',)).start()", "ok", 0, ["late"]),
    "streams closed": ("import sys; sys.stdout.close(); sys.stderr = None; 1 / 0", "error", 1, ["ZeroDiv"]),
    "main": ("import __main__, sys; print(__name__, __main__.sys is sys)", "ok", 0, ["__main__ True"]),
    "long": ("for i in range(50000): print(i)\n1 / 0", "error", 1, ["0\n1\n2\n", "bytes cut", "ZeroDiv"]),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_account(sandbox, workspace, name):
    """What a program did is told as it was: its ending, its code, its output in order, its own lines in
    tracebacks.
    """
    skip_without_signals(name)
    code, status, number, texts = ENDINGS[name]
    result = sandbox.run(code, workspace)
    assert isinstance(result, Result) and (result.status, result.code) == (status, number), result
    assert all(text in result.output for text in texts), result
    assert 0 < result.seconds < 2 and HERE not in result.output


@pytest.mark.parametrize("pieces", [["a" * 5, "b" * 5], ["abcdefghij" * 3], ["x"] * 23, ["", "abc"]])
def test_output_keeps_head_and_tail(sandbox, workspace, pieces):
    """The exception stands at the end: cutting off the tail hid it, keeping everything filled the memory."""
    code, whole = f"import os\nfor piece in {pieces}: os.write(1, piece.encode())", "".join(pieces)
    cut = len(whole) - 20
    expected = whole if cut <= 0 else whole[:10] + f"\n... {cut} bytes cut ...\n" + whole[-10:]
    assert sandbox.run(code, workspace, output=20).output == expected


def test_files_stay_and_shadow_nothing(sandbox, workspace):
    """Agents hand files on; a json.py or sitecustomize.py that one leaves must not become part of the
    next run.
    """
    sandbox.run("for n in ('json', 'sitecustomize', 'random'):\n"
                "  open(n + '.py', 'w').write('print(\"EVIL\")')\n"
                "open('helper.py', 'w').write('x = 7')", workspace)
    result = sandbox.run("import sys\nfor n in ('json', 'random'): sys.modules.pop(n, None)\n"
                         "import json, random, helper; print(helper.x, open('train.csv').read())", workspace)
    assert result.output == "7 a,b\n1,2\n\n"
    sandbox.run("import pickle, os\nclass E:\n"
                "  def __reduce__(self): return os.system, ('echo pickled; touch /tmp/evil',)\n"
                "pickle.dump(E(), open('model.pkl', 'wb'))", workspace)
    assert "pickled" in sandbox.run("import pickle; pickle.load(open('model.pkl', 'rb'))", workspace).output
    assert not os.path.exists("/tmp/evil")


@pytest.mark.parametrize("code", [
    "import os; os.symlink({truth!r}, 'submission.csv')",
    "import os; os.symlink('train.csv', 'submission.csv')",
    "import os; os.link('train.csv', 'submission.csv')",
    "import os; os.mkfifo('submission.csv')",
    "import os; os.mkdir('submission.csv')",
    "open('submission.csv', 'wb').write(b'x' * 2000)",
    "open('submission.csv', 'wb').truncate(20 << 20)",
    "pass",
])
def test_read_refuses(sandbox, host, workspace, code):
    """A link to the answers got full marks, a pipe hung the trainer, a sparse file of a terabyte filled
    its memory.
    """
    assert sandbox.run(code.format(**host.names), workspace).status == "ok"
    with pytest.raises(OSError):
        Sandbox.read(workspace, "submission.csv", most=1000)


def test_read_takes_plain_files_only_by_name(sandbox, host, workspace):
    """A name with a path leads out of the workspace; the host links and folders of a program are no files."""
    os.link(host.truth, os.path.join(workspace, "linked.csv"))
    for name in ["../" + os.path.basename(host.other) + "/secret.csv", str(host.truth), "", ".", "..", "a/b",
                 "x\0", "\ud800", "n" * 300, "linked.csv"]:
        with pytest.raises(OSError):
            Sandbox.read(workspace, name)
    os.unlink(os.path.join(workspace, "linked.csv"))
    assert Sandbox.read(workspace, "train.csv", most=8) == b"a,b\n1,2\n"


def test_cores_are_a_choice():
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


# ---------------------------------------------------------------- levels

def test_levels(capfd):
    """The level never weakens in silence: unknown and impossible ones are refused, the weak one is
    printed.
    """
    if os.geteuid() == 0:
        with pytest.raises(InputError, match="root"):
            Sandbox("limits")
        return
    with Sandbox("limits", timeout=0.5) as weak:
        workspace = weak.make_workspace()
        assert capfd.readouterr().err.count("WARNING") == 1
        assert weak.run("print(1)", workspace).output == "1\n"
        assert weak.run("while True: pass", workspace).status == "timeout"
        assert weak.run("while True: print('x' * 1000)", workspace).status == "flood"


def test_limits_level_is_printed(sandbox):
    """As test_levels, for an ordinary user when the tests run as root."""
    if sandbox.user is None:
        pytest.skip("needs root and a Python that other users can read")
    other = script("with Sandbox('limits') as s: print(s.run('print(1)', s.make_workspace()).output)",
                   user=1000, group=1000, extra_groups=[], cwd="/")
    out, err = other.communicate()
    assert out == "1\n\n" and err.count("\n") == 1 and "WITHOUT isolation" in err


BROKEN_KERNELS = {  # what a kernel, or a container's filter, may answer: (errno, calls)
    "no Landlock": (38, [444]),
    "Landlock only pretends": (0, [444, 445, 446]),
    "no more seccomp and prctl": (1, [157]),
}


@pytest.mark.parametrize("name", BROKEN_KERNELS)
def test_failed_lockdown_runs_nothing(sandbox, name):
    """Where a step of the lockdown fails or is skipped in silence, no program runs, and the message says
    what to do.
    """
    error, calls = BROKEN_KERNELS[name]
    code = f"""
def step(code, value, skip_if=0, skip_else=0): return struct.pack("HBBI", code, skip_if, skip_else, value)
steps = step(LOAD, 0)
for call in {[call if call > 400 or os.uname().machine == "x86_64" else 167 for call in calls]}:
    steps += step(IF_EQUAL, call, 0, 1) + step(RETURN, FAIL + {error})
code = ctypes.create_string_buffer(steps + step(RETURN, ALLOW))
kernel("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
kernel("prctl", PR_SET_SECCOMP, 2, struct.pack("HxxxxxxP", len(steps) // 8 + 1, ctypes.addressof(code)), 0, 0)
try: Sandbox()
except InputError as error: print(error)
run, Sandbox.run = Sandbox.run, lambda *_: Result("ok", "", 0, 0.0)         # for the probe only
with Sandbox() as sandbox:
    Sandbox.run = run
    workspace = sandbox.make_workspace()
    try: print(sandbox.run("open('ran', 'w'); open({str(HERE)!r} + '/agents.py')", workspace))
    except SandboxError: print("raised")
    print(os.listdir(workspace))
"""
    out, err = script(code).communicate()
    lines = out.splitlines()
    assert "no isolation here" in lines[0] and "--sandbox limits" in lines[0], out + err
    if name != "Landlock only pretends":        # which only the probe can tell
        assert lines[1:] == ["raised", "[]"], out + err


def test_closed(workspace):
    """A closed sandbox runs nothing more, removes its workspaces, and may be closed again."""
    with Sandbox() as short:
        path, process = short.make_workspace({"a": b"1"}), short.process
    assert not os.path.exists(path) and process.returncode is not None
    short.close()
    with pytest.raises(SandboxError, match="closed"):
        short.run("pass", path)


# ---------------------------------------------------------------- honest programs

DATA = ("import numpy as np, pandas as pd, os\nX = np.random.default_rng(0).normal(size=(500, 8))\n"
        "y = (X[:, 0] > 0).astype(int)\n")
HONEST = {  # name: (modules it needs, code, text in the output)
    "files": ("", """
import csv, shutil, os
print(list(csv.reader(open('train.csv'))))
shutil.copy2('train.csv', 'b'); shutil.move('b', 'c')
os.makedirs('d/e'); shutil.copytree('d', 'f'); shutil.rmtree('d')
print(sorted(os.listdir('.')))""", "['c', 'f', 'train.csv']"),
    "tempfile": ("", """
import tempfile, os
tempfile.NamedTemporaryFile().write(b'x')
with tempfile.TemporaryDirectory() as d: print(d.startswith(os.getcwd()))""", "True"),
    "subprocess": ("", """
import subprocess, sys
print(subprocess.run([sys.executable, '-c', 'print(1 + 1)'], capture_output=True, text=True).stdout)
print(subprocess.getoutput('ls; echo $USER'))""", "2\n\ntrain.csv\nagent"),
    "child ended": ("", """
import subprocess
p = subprocess.Popen(['sleep', '9']); p.terminate(); print(p.wait())""", "-15"),
    "sqlite": ("", """
import sqlite3
c = sqlite3.connect('a.db'); c.execute('create table t(x)'); c.commit()
print(c.execute('select count(*) from t').fetchall())""", "[(0,)]"),
    "asyncio": ("", """
import asyncio
async def f(): await asyncio.sleep(0.01); return 5
print(asyncio.run(f()))""", "5"),
    "threads": ("", """
from concurrent.futures import ThreadPoolExecutor as T
with T(4) as t: print(list(t.map(lambda x: x * x, range(4))))""", "[0, 1, 4, 9]"),
    "pickle of a class": ("", """
import pickle
class M: pass
pickle.dump(M(), open('m', 'wb')); print(type(pickle.load(open('m', 'rb'))))""", "__main__.M"),
    "dataclass": ("", """
from dataclasses import dataclass
@dataclass
class A: x: int = 1
print(A())""", "A(x=1)"),
    "user and time": ("", """
import os, getpass, datetime, zoneinfo
print(datetime.datetime.now(), getpass.getuser(), os.path.expanduser('~') == os.getcwd())""", "agent True"),
    "warning": ("", "import warnings; warnings.warn('careful')", "careful"),
    "numpy": ("numpy", """
import numpy as np
print(np.linalg.svd(np.random.rand(200, 200))[1].shape)""", "(200,)"),
    "read_csv": ("pandas", "import pandas as pd; print(pd.read_csv('train.csv').sum().sum())", "3"),
    "formats": ("pandas sklearn", DATA + """
import joblib
df = pd.DataFrame(X); df.to_csv('x.csv', index=False); joblib.dump(df, 'm')
print(pd.read_csv('x.csv').shape, joblib.load('m').shape)""", "(500, 8) (500, 8)"),
    "time zones": ("pandas", """
import pandas as pd
print(pd.Timestamp('2024-01-01', tz='Europe/Berlin'))""", "+01:00"),
    "fit, pickle, reload": ("pandas sklearn", DATA + """
import pickle
from sklearn.ensemble import RandomForestClassifier
pickle.dump(RandomForestClassifier(10, n_jobs=-1).fit(X, y), open('m.pkl', 'wb'))
print(pickle.load(open('m.pkl', 'rb')).score(X, y) > 0.9)""", "True"),
    "grid search": ("pandas sklearn", DATA + """
from sklearn.model_selection import GridSearchCV
from sklearn.svm import SVC
print(GridSearchCV(SVC(), {'C': [0.1, 1]}, n_jobs=-1, cv=3).fit(X, y).best_score_ > 0.8)""", "True"),
    "cross validation": ("pandas sklearn", DATA + """
from sklearn.model_selection import cross_val_score
from sklearn.linear_model import LogisticRegression
print(cross_val_score(LogisticRegression(), X, y, n_jobs=2).shape)""", "(5,)"),
    "boosting": ("pandas sklearn", DATA + """
from sklearn.ensemble import HistGradientBoostingClassifier
print(HistGradientBoostingClassifier(max_iter=5).fit(X, y).score(X, y) > 0.8)""", "True"),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_programs(sandbox, workspace, name):
    """A sandbox in which ordinary programs fail teaches an agent nothing: each of these works as outside."""
    skip_without_signals(name)
    modules, code, text = HONEST[name]
    missing = [module for module in modules.split() if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}")
    result = sandbox.run(code, workspace, timeout=30, memory=4 << 30)
    assert result.status == "ok" and text in result.output, result


def test_preload(sandbox):
    """Programs forked from one zygote drew the same random numbers; imports made once are shared; a
    missing one isn't.
    """
    has_numpy = importlib.util.find_spec("numpy") is not None
    code = "import random, sys; print(random.random(), 'json' in sys.modules)"
    if has_numpy:
        code += "\nprint('numpy' in sys.modules); import numpy; print(numpy.random.rand())"
    with Sandbox(preload=["numpy", "no_such_module"]) as made:
        workspace = made.make_workspace()
        first, second = made.run(code, workspace).output, made.run(code, workspace).output
    assert len(set(first.split()) & set(second.split())) == 1 and first != second and "True" in first


def test_bare_programs_are_quick(sandbox, workspace):
    """A fork and the lockdown take about 10 ms; a new interpreter with its imports would take hundreds."""
    times = sorted(sandbox.run("pass", workspace).seconds for _ in range(10))
    assert times[0] < 0.1 and Limits().timeout == 30
