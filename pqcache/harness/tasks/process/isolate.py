"""What a child process cannot reach. Standard library only; the file runs inside it. Linux, x86_64 or aarch64.

`enter` isolates the calling process for good, or raises OSError with what is missing; nothing runs half protected:

- namespaces of its own for users, processes, mounts, network, IPC, host name and cgroups: no other process, no network;
- a file system of one small tmpfs, with the interpreter's library read-only in it; no /proc, no /dev;
- no capabilities, no new privileges;
- limits of memory, CPU time, file size and open files;
- seccomp: system calls are refused unless listed here, those that start processes or threads among them.

With `bubblewrap` the first two are made by `bwrap` before this file runs. `bound` limits a process that needs no isolation.
"""

import ctypes
import os
import platform
import resource
import signal
import struct
import sys

# By machine: the audit architecture, and the numbers of the allowed system calls.
ALLOWED = {
    "x86_64": (0xC000003E, (
        0, 1, 2, 3, 4, 5, 6, 7, 8,  # read write open close stat fstat lstat poll lseek
        9, 10, 11, 12, 25, 28,  # mmap mprotect munmap brk mremap madvise
        13, 14, 15, 131,  # rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack
        17, 19, 20, 21, 22, 23, 24,  # pread64 readv writev access pipe select sched_yield
        32, 33, 292, 293,  # dup dup2 dup3 pipe2
        35, 96, 201, 228, 229, 230,  # nanosleep gettimeofday time clock_gettime clock_getres clock_nanosleep
        39, 102, 104, 107, 108, 110, 186,  # getpid getuid getgid geteuid getegid getppid gettid
        60, 219, 231,  # exit restart_syscall exit_group
        63, 97, 98, 99, 100,  # uname getrlimit getrusage sysinfo times
        77, 78, 79, 80, 82, 83, 84, 85, 87, 89,  # ftruncate getdents getcwd chdir rename mkdir rmdir creat unlink readlink
        202, 217, 257, 258, 262,  # futex getdents64 openat mkdirat newfstatat
        263, 264, 267, 269,  # unlinkat renameat readlinkat faccessat
        270, 271, 273, 318, 332, 334, 439,  # pselect6 ppoll set_robust_list getrandom statx rseq faccessat2
    ), 72),
    "aarch64": (0xC00000B7, (
        17, 23, 24, 34, 35, 38, 46, 48, 49,  # getcwd dup dup3 mkdirat unlinkat renameat ftruncate faccessat chdir
        56, 57, 59, 61, 62, 63, 64, 65, 66, 67,  # openat close pipe2 getdents64 lseek read write readv writev pread64
        72, 73, 78, 79, 80, 93, 94, 98, 99,  # pselect6 ppoll readlinkat newfstatat fstat exit exit_group futex set_robust_list
        101, 113, 114, 115, 124, 128,  # nanosleep clock_gettime clock_getres clock_nanosleep sched_yield restart_syscall
        132, 134, 135, 139, 153, 160, 163, 165, 169,  # sigaltstack rt_sig* times uname getrlimit getrusage gettimeofday
        172, 173, 174, 175, 176, 177, 178, 179,  # getpid getppid getuid geteuid getgid getegid gettid sysinfo
        214, 215, 216, 222, 226, 233,  # brk munmap mremap mmap mprotect madvise
        276, 278, 291, 293, 439,  # renameat2 getrandom statx rseq faccessat2
    ), 25),
}  # fmt: skip
FCNTL = (0, 1, 2, 3, 1030)  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC; the rest can signal other processes

NAMESPACES = {
    "user": 0x10000000, "pid": 0x20000000, "mount": 0x00020000, "net": 0x40000000, "ipc": 0x08000000,
    "uts": 0x04000000, "cgroup": 0x02000000,
}  # fmt: skip
READ_ONLY, NO_SUID, NO_DEV, NO_EXEC, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
ROOT = "/tmp"  # where the new root is mounted
OLD = "/old"  # where the old root is seen in the new one, until it is left
WORK = "/work"  # the only writable folder


def bound(settings: dict) -> None:
    """Limit the memory of this process, in MiB: numbers such as 9^(9^9) must fail here, not fill the machine. It ends with
    its parent, also in the middle of a call; elsewhere than on Linux at its next read.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != settings["parent"]:  # it ended before that call
            os._exit(1)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (_at_most(settings["memory"] << 20, hard), hard))


def _at_most(wanted: int, hard: int) -> int:
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)


def enter(settings: dict) -> None:
    """Isolate this process. settings: how (unshare | bubblewrap); files to show as (source,
    place) pairs, folders to hide; memory and disk in MiB, seconds of CPU.

    With unshare the process goes on as the first one of a new PID namespace; the calling one waits for it and ends.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ALLOWED:
        raise OSError(f"needs Linux on {' or '.join(ALLOWED)}; this is {sys.platform} on {machine}")
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.prctl(1, signal.SIGKILL, 0, 0, 0), "prctl")  # the end of its parent is its own
    if settings["how"] == "unshare":
        _namespaces(libc)
        _file_system(libc, settings["files"], settings["hidden"], machine)
    size = f"size={settings['disk']}m,nr_inodes=4096,mode=755"
    _mount(libc, "tmpfs", WORK, "tmpfs", NO_SUID | NO_DEV | NO_EXEC, size)
    os.chdir(WORK)
    _limits(settings["memory"], settings["seconds"])
    _privileges(libc)
    _seccomp(libc, machine)


def _check(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def _namespaces(libc: ctypes.CDLL) -> None:
    user, group = os.geteuid(), os.getegid()
    for name, flag in NAMESPACES.items():
        _check(libc.unshare(flag), f"a {name} namespace")
        if name == "user":
            for file, text in (("setgroups", "deny"), ("uid_map", f"65534 {user} 1"), ("gid_map", f"65534 {group} 1")):
                with open(f"/proc/self/{file}", "w") as mapping:
                    mapping.write(text)
    child = os.fork()
    if child:
        os.closerange(0, 4096)
        os.waitpid(child, 0)
        os._exit(0)
    _check(libc.prctl(1, signal.SIGKILL, 0, 0, 0), "prctl")


def _file_system(libc: ctypes.CDLL, files: list, hidden: list, machine: str) -> None:
    """A root of its own: a tmpfs with the listed files and folders, read-only, and `hidden` folders emptied."""
    _mount(libc, "none", "/", None, RECURSIVE | PRIVATE)
    _mount(libc, "tmpfs", ROOT, "tmpfs", NO_SUID | NO_DEV, "size=1m,mode=755")
    os.mkdir(ROOT + OLD)
    _check(libc.syscall(PIVOT_ROOT[machine], ROOT.encode(), (ROOT + OLD).encode()), "pivot_root")
    os.chdir("/")
    for source, path in files:
        if os.path.isdir(OLD + source):
            os.makedirs(path, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            open(path, "w").close()
        _mount(libc, OLD + source, path, None, BIND)
        kept = os.statvfs(path).f_flag & (NO_SUID | NO_DEV | NO_EXEC)
        _mount(libc, "none", path, None, REMOUNT | BIND | READ_ONLY | kept | NO_SUID | NO_DEV)
    for path in hidden:
        _mount(libc, "tmpfs", path, "tmpfs", READ_ONLY | NO_SUID | NO_DEV, "size=4k")
    os.mkdir(WORK)
    _check(libc.umount2(OLD.encode(), 2), "umount")  # detached: it cannot be reached again
    os.rmdir(OLD)
    _mount(libc, "none", "/", None, REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEV)


def _mount(libc: ctypes.CDLL, source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, data)]
    _check(libc.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]), f"mounting {target}")


def _limits(memory: int, seconds: int) -> None:
    for kind, maximum in (
        (resource.RLIMIT_AS, memory << 20),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, 1 << 20),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        limit = _at_most(maximum, resource.getrlimit(kind)[1])
        resource.setrlimit(kind, (limit, limit))


def _privileges(libc: ctypes.CDLL) -> None:
    """Give up every capability; none can be gained again."""
    for capability in range(64):
        if libc.prctl(24, capability, 0, 0, 0) != 0:  # fails without CAP_SETPCAP, and behind the last one
            break
    header, none = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    _check(libc.capset(header, none), "capset")
    _check(libc.prctl(38, 1, 0, 0, 0), "no_new_privs")


def _seccomp(libc: ctypes.CDLL, machine: str) -> None:
    """Refuse (EPERM) every system call that is not allowed; another architecture's calls end the process."""
    arch, numbers, fcntl = ALLOWED[machine]

    def step(code: int, k: int, jt: int = 0, jf: int = 0) -> bytes:
        return struct.pack("=HBBI", code, jt, jf, k)

    load, equal, at_least, ret = 0x20, 0x15, 0x35, 0x06
    allow, refuse, kill = step(ret, 0x7FFF0000), step(ret, 0x00050001), step(ret, 0x80000000)
    program = [step(load, 4), step(equal, arch, 1, 0), kill, step(load, 0)]
    program += [step(at_least, 0x40000000, 0, 1), kill]  # the x32 calls of x86_64
    for number in numbers:
        program += [step(equal, number, 0, 1), allow]
    commands = [text for command in FCNTL for text in (step(equal, command, 0, 1), allow)]
    program += [step(equal, fcntl, 1, 0), refuse, step(load, 24), *commands, refuse]
    code = ctypes.create_string_buffer(b"".join(program))
    filter_program = struct.pack("@HP", len(program), ctypes.addressof(code))
    _check(libc.prctl(22, 2, ctypes.create_string_buffer(filter_program), 0, 0), "seccomp")
