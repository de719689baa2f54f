#!/usr/bin/env python3
"""Simulates several hosts on one machine, each with a network, shared memory, host name, process IDs and IPC of its own.

    simulated.py [--hosts a,b] [--gbit G] [--] command ...   make hosts, run a command on the first, remove all hosts
    simulated.py rsh [-x ...] HOST command ...               run a command on a host (mpirun calls this in place of ssh)
    simulated.py FAULT HOST                                  inject a fault into a host

The faults are: ``unplug`` and ``plug`` (cut and restore the network), ``kill`` (kill all processes), ``down`` ("power
loss": both, so that no peer receives a FIN or RST), ``freeze`` and ``thaw`` (stop and continue all processes).

The last two forms work inside a command that the first form has started.  Everything lives in namespaces of one process
tree.  The kernel removes all of it when the command ends, or when this process or its parent is killed; nothing is left
in /run/netns or /dev/shm.  The tree has only its own bridge, and no route to other networks.

Needs util-linux (unshare, nsenter), iproute2 (ip; tc for --gbit, the limit of what each host sends), and either root
with CAP_SYS_ADMIN and CAP_NET_ADMIN, or a kernel that lets this user make user namespaces (the user is then root inside
of them only).  Without these the exit status is 77 ("skipped" in automake).

Hosts share the file system, as on a network file system, except /dev/shm, $TMPDIR, /etc/hosts and /proc.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

STATE = os.environ.get("SIMULATED_HOSTS_STATE", "/tmp/.simulated-hosts")  # each tree mounts a tmpfs of its own there
SOCKET = f"{STATE}/control"
SUBNET = "10.77.0."


#: Options of unshare: new namespaces, whose processes are killed when unshare is.
NAMESPACES = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]


def main() -> int:
    """Run a program in the network, or its part in a namespace, or request a fault; return the exit status."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] == "rsh":
        return rsh(arguments[1:])
    if arguments and arguments[0] in FAULTS:
        return send_request({"operation": arguments[0], "host": arguments[1]})
    options, command = parse_options(arguments)
    if "--lifeline" not in options:
        return enter_namespaces(options, command)
    # This is the process that `run_while_parent_lives` has started in the namespaces.
    threading.Thread(target=exit_at_end_of_file, args=(int(options["--lifeline"]),), daemon=True).start()
    return Network(options["--hosts"].split(","), options.get("--gbit")).run(command)


def parse_options(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """Split a command line into the values of options and the command to run.

    ``--lifeline`` is for this script's call of itself: the descriptor of a pipe's read end.
    """
    options, command = {"--hosts": "a,b"}, list(arguments)
    while command and command[0].startswith("--"):
        option = command.pop(0)
        if option == "--":
            break
        if option not in ("--hosts", "--gbit", "--lifeline"):
            sys.exit(f"{option}: see the top of {__file__}")
        options[option] = command.pop(0)
    return options, command


def enter_namespaces(options: dict[str, str], command: list[str]) -> int:
    """Run this script with the same options in new namespaces; return its exit status, or 77 if there can be none."""
    os.makedirs(STATE, exist_ok=True)
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    # In a user namespace, /proc can be mounted again only together with a new pid namespace.
    trial = subprocess.run(["unshare", *user, *NAMESPACES, "true"], capture_output=True, text=True)
    if trial.returncode:
        print(f"no namespaces here: {trial.stderr.strip()}", file=sys.stderr)
        return 77
    words = [word for option in options.items() for word in option]
    return run_while_parent_lives(
        ["unshare", *user, *NAMESPACES, sys.executable, os.path.abspath(__file__), *words], command
    )


def run_while_parent_lives(tree: list[str], command: list[str]) -> int:
    """Run a command in a tree of namespaces; end the tree when this process or its parent exits, even if killed.

    The tree reads the *lifeline*, a pipe whose other end only this process has open: the kernel closes it at its exit.
    """
    # PR_SET_PDEATHSIG would not do: it fires when the parent's thread exits, and unshare --user resets it.
    parent = os.getppid()
    lifeline, write_end = os.pipe()
    child = subprocess.Popen([*tree, "--lifeline", str(lifeline), "--", *command], pass_fds=[lifeline])
    os.close(lifeline)
    try:
        while os.getppid() == parent:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(1)
        return 1
    finally:
        os.close(write_end)
        child.kill()
        child.wait()


def exit_at_end_of_file(lifeline: int) -> None:
    """Exit once no process has the other end of a pipe open: the kernel then kills the whole pid namespace."""
    os.read(lifeline, 1)
    os._exit(1)


def run_checked(*words: str) -> None:
    """Run a command; raise an error if it fails."""
    subprocess.run(words, check=True)


class Network:
    """The hosts, their network switch, and a server in place of sshd.

    Parameters
    ----------
    names : list of str
        Names of the hosts.
    gbit : str or None
        Gigabits per second that each host may send; None: no limit.

    Attributes
    ----------
    pids : dict of str to int
        First process of each host.
    unreachable : set of str
        Hosts whose network has been cut.
    entered : list of int
        Processes that have entered a host.
    """

    def __init__(self, names: list[str], gbit: str | None):
        self.pids: dict[str, int] = {}
        self.unreachable: set[str] = set()
        self.entered: list[int] = []
        run_checked("mount", "-t", "tmpfs", "tmpfs", STATE)
        with open(f"{STATE}/hosts", "w") as file:
            file.write("127.0.0.1 localhost\n")
            file.writelines(f"{SUBNET}{i + 1} {name}\n" for i, name in enumerate(names))
        run_checked("ip", "link", "set", "lo", "up")
        run_checked("ip", "link", "add", "switch", "type", "bridge")
        run_checked("ip", "link", "set", "switch", "up")
        self.server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.server.bind(SOCKET)
        self.server.listen(64)
        for i, name in enumerate(names):
            self.pids[name] = self.start_host(name, f"{SUBNET}{i + 1}/24", gbit)
        threading.Thread(target=self.serve, daemon=True).start()

    def start_host(self, name: str, address: str, gbit: str | None) -> int:
        """Start a host's namespaces and network; return the ID of its first process."""
        ready = f"{STATE}/{name}.ready"
        setup = (
            f"mount -t tmpfs -o mode=1777,size=1g tmpfs /dev/shm && mkdir -p {STATE}/{name}.tmp && "
            f"mount --bind {STATE}/hosts /etc/hosts && hostname {name} && ip link set lo up && "
            f"touch {ready} && exec sleep infinity"
        )
        # A session of its own: Ctrl-C at the terminal must not kill a host's first process.
        holder = subprocess.Popen(["unshare", *NAMESPACES, "sh", "-c", setup], start_new_session=True)
        deadline = time.monotonic() + 10
        while not os.path.exists(ready):
            if holder.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"host {name} did not start")
            time.sleep(0.01)
        with open(f"/proc/{holder.pid}/task/{holder.pid}/children") as file:
            pid = int(file.read().split()[0])
        run_checked("ip", "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        run_checked("ip", "link", "set", f"to-{name}", "master", "switch", "up")
        in_network = ["nsenter", "-t", str(pid), "-n"]
        run_checked(*in_network, "ip", "address", "add", address, "dev", "eth0")
        run_checked(*in_network, "ip", "link", "set", "eth0", "up")
        if gbit:
            shape = ["rate", f"{gbit}gbit", "burst", "1m", "latency", "50ms"]
            run_checked(*in_network, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *shape)
        return pid

    def enter(self, name: str, words: list[str], env: dict[str, str], cwd: str, **options) -> subprocess.Popen:
        """Start a command on a host, with these options of `subprocess.Popen`."""
        env = {**env, "TMPDIR": f"{STATE}/{name}.tmp", "HOSTNAME": name}
        flags = ["nsenter", "-t", str(self.pids[name]), "-n", "-m", "-u", "-i", "-p"]
        child = subprocess.Popen([*flags, f"--wd={cwd}", *words], env=env, **options)
        self.entered.append(child.pid)
        return child

    def run(self, words: list[str]) -> int:
        """Run a command on the first host, and return its exit status."""
        first = next(iter(self.pids))
        child = self.enter(first, words, dict(os.environ), os.getcwd())
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda n, frame: child.send_signal(n))
        code = child.wait()
        return code if code >= 0 else 128 - code

    # -- the server in place of sshd -----------------------------------------------------------------------------

    def serve(self) -> None:
        """Handle each connection in a thread."""
        while True:
            connection, _ = self.server.accept()
            threading.Thread(target=self.handle_connection, args=(connection,), daemon=True).start()

    def handle_connection(self, connection: socket.socket) -> None:
        """Receive one request, run its command or inject its fault, and send the exit status."""
        message, files, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        request = json.loads(message)
        operation, name, status = request["operation"], request["host"], 255
        try:
            if operation == "rsh":
                status = self.run_remotely(name, request, files)
            else:
                for inject in FAULTS[operation]:
                    inject(self, name)
                status = 0
        except Exception as error:
            print(f"simulated.py {operation} {name}: {error}", file=sys.stderr)
        with contextlib.suppress(OSError):
            connection.send(json.dumps(status if status >= 0 else 128 - status).encode())
        connection.close()

    def run_remotely(self, name: str, request: dict, files: list[int]) -> int:
        """Run a request's command on a host, as sshd does, with these standard streams; return its exit status."""
        # As in sshd, a shell interprets the words.
        words = ["setsid", "sh", "-c", request["command"]]
        stdin, stdout, stderr = files
        child = self.enter(name, words, request["env"], request["cwd"], stdin=stdin, stdout=stdout, stderr=stderr)
        for file in files:
            os.close(file)
        status = child.wait()
        while name in self.unreachable:  # the caller receives nothing, not even an end of file
            time.sleep(1)
        return status

    # -- faults --------------------------------------------------------------------------------------------------

    def cut_network(self, name: str) -> None:
        """Take down a host's port at the switch."""
        self.unreachable.add(name)
        run_checked("ip", "link", "set", f"to-{name}", "down")

    def restore_network(self, name: str) -> None:
        """Undo `cut_network`."""
        self.unreachable.discard(name)
        run_checked("ip", "link", "set", f"to-{name}", "up")

    def kill_processes(self, name: str) -> None:
        """Kill a host's first process, and so its whole pid namespace."""
        os.kill(self.pids[name], signal.SIGKILL)

    def stop_processes(self, name: str) -> None:
        """Stop all processes of a host except the first."""
        self.signal_processes(name, signal.SIGSTOP)

    def continue_processes(self, name: str) -> None:
        """Continue all processes of a host, and each nsenter: it stops itself when its child is stopped."""
        self.signal_processes(name, signal.SIGCONT)
        for pid in self.entered:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def signal_processes(self, name: str, number: int) -> None:
        """Send a signal to all processes of a host except the first."""
        namespace = os.stat(f"/proc/{self.pids[name]}/ns/pid").st_ino
        for entry in os.listdir("/proc"):
            if entry.isdecimal() and int(entry) != self.pids[name]:
                with contextlib.suppress(OSError):
                    if os.stat(f"/proc/{entry}/ns/pid").st_ino == namespace:
                        os.kill(int(entry), number)


#: Methods that inject each fault, in order.
FAULTS = {
    "unplug": [Network.cut_network],
    "plug": [Network.restore_network],
    "kill": [Network.kill_processes],
    "down": [Network.cut_network, Network.kill_processes],
    "freeze": [Network.stop_processes],
    "thaw": [Network.continue_processes],
}


def send_request(request: dict) -> int:
    """Send a request to the server, with this process's standard streams; return the exit status."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(SOCKET)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
    reply = connection.recv(64)
    return json.loads(reply) if reply else 255


def rsh(words: list[str]) -> int:
    """Run a command on a host, as ``ssh HOST command`` would; return its exit status."""
    while words and words[0].startswith("-"):  # options of ssh have no meaning here
        words.pop(0)
    names = ("PATH", "HOME", "USER", "LANG", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
    env = {
        name: value
        for name, value in os.environ.items()
        if name in names
        or name.startswith(("FAKE_", "PYTENSOR_", "PYTHON", "OMP_", "OMPI_", "PRTE_", "PMIX_", "MPIR_", "MM_"))
    }
    return send_request(
        {"operation": "rsh", "host": words[0], "command": " ".join(words[1:]), "env": env, "cwd": os.getcwd()}
    )


if __name__ == "__main__":
    sys.exit(main())
