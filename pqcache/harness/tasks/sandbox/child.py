"""The process that runs a program (started by parent.py): python child.py <folder> <MiB> <seconds of CPU>.

It reads a token and the program from stdin, limits itself, runs the program, and prints the token if the program ran to
its end. It imports the standard library only; nothing of this package is in the process.
"""

import contextlib
import ctypes
import os
import platform
import resource
import struct
import sys

# System calls that start a process or thread, reach the network or another process; per machine
DENIED = {
    "x86_64": (0xC000003E, (41, 53, 56, 57, 58, 59, 62, 101, 200, 234, 310, 311, 322, 425, 434, 435)),
    "aarch64": (0xC00000B7, (117, 129, 130, 131, 198, 199, 220, 221, 270, 271, 281, 425, 434, 435)),
}
WRITES = 0b0111_1111_1111_0010  # Landlock's rights to write, remove, make and truncate
EVENTS = ("socket.", "subprocess.", "os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.kill",
          "os.startfile", "pty.spawn", "ctypes.", "signal.pthread_kill", "_thread.start_new_thread")  # fmt: skip
CHANGES = ("os.chmod", "os.chown", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink",
           "os.truncate", "os.utime", "os.setxattr", "shutil.")  # fmt: skip


def limit(memory: int, seconds: int) -> None:
    """Limit address space (MiB), CPU time, file size (1 MiB), open files, core dumps and processes."""
    for resource_kind, maximum in (
        (resource.RLIMIT_AS, memory << 20),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, 1 << 20),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        # a lower hard limit is set already, or the system has no such limit
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource_kind, (maximum, maximum))


def landlock(libc: ctypes.CDLL, folder: str) -> bool:
    """Let the kernel refuse writes outside `folder`, and TCP."""
    version = libc.syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    if version < 1:
        return False
    writes = WRITES & ~(0 if version >= 2 else 1 << 13) & ~(0 if version >= 3 else 1 << 14)
    rules = struct.pack("=Q", writes) + (struct.pack("=Q", 3) if version >= 4 else b"")
    ruleset = libc.syscall(444, rules, ctypes.c_size_t(len(rules)), ctypes.c_uint(0))
    if ruleset < 0:
        return False
    inside = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    rule = struct.pack("=Qi", writes, inside)
    done = libc.syscall(445, ruleset, ctypes.c_int(1), rule, ctypes.c_uint(0)) == 0
    done = done and libc.syscall(446, ruleset, ctypes.c_uint(0)) == 0
    os.close(inside)
    os.close(ruleset)
    return bool(done)


def seccomp(libc: ctypes.CDLL) -> bool:
    """Let the kernel refuse the DENIED system calls."""
    if platform.machine() not in DENIED:
        return False
    arch, numbers = DENIED[platform.machine()]

    def step(code: int, k: int, jt: int = 0, jf: int = 0) -> bytes:
        return struct.pack("=HBBI", code, jt, jf, k)

    n = len(numbers)
    program = [step(0x20, 4), step(0x15, arch, 0, n + 3), step(0x20, 0), step(0x35, 0x40000000, n + 1, 0)]
    program += [step(0x15, number, n - i, 0) for i, number in enumerate(numbers)]
    program += [step(0x06, 0x7FFF0000), step(0x06, 0x00050001)]  # allow; "not permitted"
    code = ctypes.create_string_buffer(b"".join(program))
    filter_program = struct.pack("@HP", len(program), ctypes.addressof(code))
    return libc.prctl(22, 2, ctypes.create_string_buffer(filter_program), 0, 0) == 0


def watch(folder: str) -> None:
    """Let the interpreter refuse the same. Where the kernel refuses nothing, this is the only protection."""
    real, inside = os.path.realpath, os.path.realpath(folder)

    def outside(path: object) -> bool:
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        if not isinstance(path, str):
            return False  # an open file, or nothing
        target = real(path)
        return target != inside and not target.startswith(inside + os.sep) and target != os.devnull

    def hook(event: str, arguments: tuple) -> None:
        if event.startswith(EVENTS):
            raise PermissionError(f"{event} is not allowed here")
        if event == "open":
            path, mode, flags = arguments
            writing = any(c in mode for c in "wax+") if isinstance(mode, str) else False
            writing = writing or bool((flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND))
            if writing and outside(path):
                raise PermissionError("writing outside the folder is not allowed here")
        elif event.startswith(CHANGES) and any(outside(a) for a in arguments if isinstance(a, str | bytes)):
            raise PermissionError(f"{event} outside the folder is not allowed here")

    sys.addaudithook(hook)


def main() -> None:
    """Run the program on stdin and print the token with the protections, or the error."""
    folder, memory, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    token, _, program = sys.stdin.buffer.read().decode().partition("\n")
    answer = os.dup(1)
    quiet = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(quiet, number)
    active = []
    limit(memory, seconds)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        # "no new privileges" is needed by the two below
        if libc.prctl(38, 1, 0, 0, 0) == 0:
            active += ["landlock"] if landlock(libc, folder) else []
            active += ["seccomp"] if seccomp(libc) else []
    watch(folder)
    active.append("audit")
    sys.argv[:] = ["program"]
    write, leave = os.write, os._exit
    try:
        exec(compile(program, "program.py", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    except BaseException as error:
        write(answer, f"{type(error).__name__}: {error}".encode(errors="replace")[:400])
        leave(1)
    write(answer, f"{token} {' '.join(active)}".encode())
    leave(0)


if __name__ == "__main__":
    main()
