#!/usr/bin/env python3
"""Several hosts on one machine, for tests: network, shared memory, host name, process ids and IPC of their own.

    simulated.py [--hosts a,b] [--gbit G] [--] command ...   make hosts, run a command on the first, take all away
    simulated.py rsh [-x ...] HOST command ...                        run a command on a host (what mpirun calls for ssh)
    simulated.py unplug|plug|kill|down|freeze|thaw HOST               faults: cable out or in; all processes killed; both
                                                                  ("power loss": nobody gets a FIN or RST); all stopped,
                                                                  or continued

The last two work inside of a command that the first has started.  Everything lives in namespaces of one process tree:
when the first command ends, however it ends, the kernel takes all of it away, and nothing is left in /run/netns or
/dev/shm.  Nothing but the tree's own bridge is reached: there is no route to anywhere else.

Needs util-linux (unshare, nsenter), iproute2 (ip; tc for --gbit, which limits what each host sends), and either root with CAP_SYS_ADMIN and
CAP_NET_ADMIN, or a kernel that lets this user make user namespaces (then the user is root inside, and nowhere else).
Exit code 77 ("skipped", as automake has it) where neither is the case.

Hosts share the file system, as with a network file system, but for /dev/shm, $TMPDIR, /etc/hosts and /proc.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

STATE = os.environ.get("SIMULATED_HOSTS_STATE", "/tmp/.simulated-hosts")  # a tmpfs of each tree's own is mounted there
SOCKET = f"{STATE}/control"
SUBNET = "10.77.0."


def main() -> int:
    argv = sys.argv[1:]
    if argv and argv[0] == "rsh":
        return rsh(argv[1:])
    if argv and argv[0] in ("unplug", "plug", "kill", "down", "freeze", "thaw"):
        return ask({"op": argv[0], "host": argv[1]})
    names, inner, opts = ["a", "b"], False, {}
    while argv and argv[0].startswith("--"):
        option = argv.pop(0)
        if option == "--":
            break
        if option == "--hosts":
            names = argv.pop(0).split(",")
        elif option == "--inner":
            inner = True
        elif option == "--gbit":
            opts[option] = argv.pop(0)
        else:
            sys.exit(f"{option}: see the top of {__file__}")
    if not inner:
        os.makedirs(STATE, exist_ok=True)
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        # In a user namespace /proc can only be mounted anew by who has a pid namespace too, as here.
        spaces = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        trial = subprocess.run(["unshare", *user, *spaces, "true"], capture_output=True, text=True)
        if trial.returncode:
            print(f"no namespaces here: {trial.stderr.strip()}", file=sys.stderr)
            return 77
        more = [x for pair in opts.items() for x in pair]
        tree = ["unshare", *user, *spaces, sys.executable, os.path.abspath(__file__), "--inner", *more]
        return subprocess.run([*tree, "--hosts", ",".join(names), "--", *argv]).returncode
    return Tree(names, opts).run(argv)


def sh(*words: str) -> None:
    subprocess.run(words, check=True)


class Tree:
    """The root of the namespaces: the network switch and the replacement of ssh."""

    def __init__(self, names: list[str], opts: dict[str, str]):
        self.pids: dict[str, int] = {}
        self.dark: set[str] = set()
        self.entered: list[int] = []
        sh("mount", "-t", "tmpfs", "tmpfs", STATE)
        with open(f"{STATE}/hosts", "w") as file:
            file.write("127.0.0.1 localhost\n")
            file.writelines(f"{SUBNET}{i + 1} {name}\n" for i, name in enumerate(names))
        sh("ip", "link", "set", "lo", "up")
        sh("ip", "link", "add", "switch", "type", "bridge")
        sh("ip", "link", "set", "switch", "up")
        self.server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.server.bind(SOCKET)
        self.server.listen(64)
        for i, name in enumerate(names):
            self.pids[name] = self.boot(name, f"{SUBNET}{i + 1}/24", opts)
        threading.Thread(target=self.serve, daemon=True).start()

    def boot(self, name: str, address: str, opts: dict[str, str]) -> int:
        ready = f"{STATE}/{name}.ready"
        setup = (
            f"mount -t tmpfs -o mode=1777,size=1g tmpfs /dev/shm && mkdir -p {STATE}/{name}.tmp && "
            f"mount --bind {STATE}/hosts /etc/hosts && hostname {name} && ip link set lo up && "
            f"touch {ready} && exec sleep infinity"
        )
        spaces = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        # A session of its own: Ctrl-C at the terminal is not for a computer's first process.
        holder = subprocess.Popen(["unshare", *spaces, "sh", "-c", setup], start_new_session=True)
        deadline = time.monotonic() + 10
        while not os.path.exists(ready):
            if holder.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"host {name} did not start")
            time.sleep(0.01)
        with open(f"/proc/{holder.pid}/task/{holder.pid}/children") as file:
            pid = int(file.read().split()[0])
        sh("ip", "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        sh("ip", "link", "set", f"to-{name}", "master", "switch", "up")
        inside = ["nsenter", "-t", str(pid), "-n"]
        sh(*inside, "ip", "address", "add", address, "dev", "eth0")
        sh(*inside, "ip", "link", "set", "eth0", "up")
        if opts:
            shape = ["rate", f"{opts['--gbit']}gbit", "burst", "1m", "latency", "50ms"]
            sh(*inside, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *shape)
        return pid

    def enter(self, name: str, words: list[str], env: dict[str, str], cwd: str, **how) -> subprocess.Popen:
        env = {**env, "TMPDIR": f"{STATE}/{name}.tmp", "HOSTNAME": name}
        flags = ["nsenter", "-t", str(self.pids[name]), "-n", "-m", "-u", "-i", "-p"]
        child = subprocess.Popen([*flags, f"--wd={cwd}", *words], env=env, **how)
        self.entered.append(child.pid)
        return child

    def run(self, words: list[str]) -> int:
        first = next(iter(self.pids))
        child = self.enter(first, words, dict(os.environ), os.getcwd())
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda n, frame: child.send_signal(n))
        code = child.wait()
        return code if code >= 0 else 128 - code

    # -- replacement of ssh --------------------------------------------------------------------------------------

    def serve(self) -> None:
        while True:
            connection, _ = self.server.accept()
            threading.Thread(target=self.answer, args=(connection,), daemon=True).start()

    def answer(self, connection: socket.socket) -> None:
        message, files, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        request = json.loads(message)
        op, name, code = request["op"], request["host"], 255
        try:
            if op == "rsh":
                # As in sshd, a shell interprets the words.
                child = self.enter(
                    name,
                    ["setsid", "sh", "-c", request["command"]],
                    request["env"],
                    request["cwd"],
                    stdin=files[0],
                    stdout=files[1],
                    stderr=files[2],
                )
                for file in files:
                    os.close(file)
                code = child.wait()
                while name in self.dark:  # a caller of such a host gets no answer, not even an end of file
                    time.sleep(1)
            else:
                if op in ("unplug", "down"):
                    self.dark.add(name)
                    sh("ip", "link", "set", f"to-{name}", "down")
                if op == "plug":
                    self.dark.discard(name)
                    sh("ip", "link", "set", f"to-{name}", "up")
                if op in ("kill", "down"):
                    os.kill(
                        self.pids[name], signal.SIGKILL
                    )  # the end of a pid namespace's first process kills all others
                if op in ("freeze", "thaw"):
                    space = os.stat(f"/proc/{self.pids[name]}/ns/pid").st_ino
                    for entry in os.listdir("/proc"):
                        if entry.isdecimal() and int(entry) != self.pids[name]:
                            try:
                                if os.stat(f"/proc/{entry}/ns/pid").st_ino == space:
                                    os.kill(int(entry), signal.SIGSTOP if op == "freeze" else signal.SIGCONT)
                            except OSError:
                                pass
                if op == "thaw":  # nsenter stops itself when its child is stopped
                    for pid in self.entered:
                        try:
                            os.kill(pid, signal.SIGCONT)
                        except ProcessLookupError:
                            pass
                code = 0
        except Exception as error:
            print(f"simulated.py {op} {name}: {error}", file=sys.stderr)
        try:
            connection.send(json.dumps(code if code >= 0 else 128 - code).encode())
        except OSError:
            pass
        connection.close()


def ask(request: dict) -> int:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(SOCKET)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
    answer = connection.recv(64)
    return json.loads(answer) if answer else 255


def rsh(words: list[str]) -> int:
    while words and words[0].startswith("-"):  # ssh's options, of which none has a meaning here
        words.pop(0)
    keep = ("PATH", "HOME", "USER", "LANG", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
    env = {
        k: v
        for k, v in os.environ.items()
        if k in keep
        or k.startswith(("PRETENDED_", "PYTENSOR_", "PYTHON", "OMP_", "OMPI_", "PRTE_", "PMIX_", "MPIR_", "MM_"))
    }
    return ask({"op": "rsh", "host": words[0], "command": " ".join(words[1:]), "env": env, "cwd": os.getcwd()})


if __name__ == "__main__":
    sys.exit(main())
