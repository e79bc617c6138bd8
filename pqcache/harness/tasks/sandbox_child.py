"""The process that runs a program (see sandbox.py): python sandbox_child.py <folder> <MiB> <seconds of CPU>.

Reads a token and the program from stdin, limits itself, runs the program and, if that came to its end, says the token.
Only the standard library is imported: nothing of this package is in the process.
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
    for what, most in (
        (resource.RLIMIT_AS, memory << 20),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, 1 << 20),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        with contextlib.suppress(ValueError, OSError):  # a lower hard limit is there already, or none of this kind
            resource.setrlimit(what, (most, most))


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
    given = struct.pack("@HP", len(program), ctypes.addressof(code))
    return libc.prctl(22, 2, ctypes.create_string_buffer(given), 0, 0) == 0


def watch(folder: str) -> None:
    """Let the interpreter refuse the same; the only protection where the kernel offers none."""
    real, inside = os.path.realpath, os.path.realpath(folder)

    def outside(path: object) -> bool:
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        if not isinstance(path, str):
            return False  # an open file, or nothing
        found = real(path)
        return found != inside and not found.startswith(inside + os.sep) and found != os.devnull

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
    folder, memory, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    token, _, program = sys.stdin.buffer.read().decode().partition("\n")
    answer = os.dup(1)
    quiet = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(quiet, number)
    held = []
    limit(memory, seconds)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(38, 1, 0, 0, 0) == 0:  # no new privileges: what the two below need
            held += ["landlock"] if landlock(libc, folder) else []
            held += ["seccomp"] if seccomp(libc) else []
    watch(folder)
    held.append("audit")
    sys.argv[:] = ["program"]
    write, leave = os.write, os._exit
    try:
        exec(compile(program, "program.py", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    except BaseException as error:
        write(answer, f"{type(error).__name__}: {error}".encode(errors="replace")[:400])
        leave(1)
    write(answer, f"{token} {' '.join(held)}".encode())
    leave(0)


if __name__ == "__main__":
    main()
