#!/usr/bin/env bash
# Try launch=slurm on a SLURM of one machine: a sweep is run, one of its array tasks is cancelled and one is killed, and the
# rows are compared with those of an undisturbed run in one process.
#
#   scripts/try_slurm.sh [scratch folder]       needs the Debian packages slurm-wlm and munge, and root
#
# Everything lies in the scratch folder: keys, state, logs, results. The daemons are stopped at the end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scratch=$(realpath "${1:-$(mktemp -d)}")
python=${PYTHON:-.venv/bin/python}
sweep=(-m method=full,pqcache,streaming,snapkv budget=0.2,0.1 task=pocket_qa task.length=1024 limit=8 wandb=disabled)
export OMP_NUM_THREADS=1

for program in munged slurmctld slurmd sbatch srun squeue sinfo scancel pgrep; do
    command -v "$program" > /dev/null || { echo "$program is not installed (Debian: slurm-wlm munge)" >&2; exit 2; }
done

host=$(hostname -s)
mkdir -p "$scratch"/{state,spool,log,munge}
chmod 700 "$scratch/munge"
head -c 1024 /dev/urandom > "$scratch/munge/key"
chmod 600 "$scratch/munge/key"
cat > "$scratch/slurm.conf" << CONF
ClusterName=one
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$scratch/munge/socket
CredType=cred/munge
SlurmctldPort=16817
SlurmdPort=16818
StateSaveLocation=$scratch/state
SlurmdSpoolDir=$scratch/spool
SlurmctldPidFile=$scratch/slurmctld.pid
SlurmdPidFile=$scratch/slurmd.pid
SlurmctldLogFile=$scratch/log/slurmctld.log
SlurmdLogFile=$scratch/log/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
KillWait=3
NodeName=$host NodeAddr=127.0.0.1 CPUs=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) State=UNKNOWN
PartitionName=main Nodes=$host Default=YES MaxTime=INFINITE State=UP
CONF
export SLURM_CONF=$scratch/slurm.conf

driver=
stop() {
    [ -n "$driver" ] && kill "$driver" 2> /dev/null || true
    scancel --quiet --me 2> /dev/null || true
    for name in slurmd slurmctld; do [ -f "$scratch/$name.pid" ] && kill "$(cat "$scratch/$name.pid")" || true; done
    [ -f "$scratch/munge/pid" ] && kill "$(cat "$scratch/munge/pid")" || true
}
trap stop EXIT
munged --force --key-file="$scratch/munge/key" --socket="$scratch/munge/socket" --pid-file="$scratch/munge/pid" \
    --log-file="$scratch/munge/log" --seed-file="$scratch/munge/seed"
slurmctld -c
slurmd -c

running() { squeue --noheader --array --me --states=RUNNING --format=%i 2> /dev/null | sort; }
samples() { cat "$scratch"/slurm/*/samples-*.jsonl 2> /dev/null | wc -l; }
samples_are() { [ "$(samples)" -ge "$1" ] && [ -n "$(running)" ]; }
queue_is_empty() { local queue; queue=$(squeue --noheader --me 2> /dev/null) && [ -z "$queue" ]; }
node_is_idle() { [[ $(sinfo --noheader --format=%T 2> /dev/null) == *idle* ]]; }
# The Python of an array task of this run: neither its srun nor another run's.
worker() { pgrep -f "^[^ ]*python[^ ]* .*submitit\.core\._submit $scratch/slurm/" | tail -n 1; }
kill_a_worker() { local victim; victim=$(worker) && kill -9 "$victim" && echo "kill -9 the worker with process id $victim"; }
await() {
    for _ in $(seq 2400); do "$@" && return 0; sleep 0.5; done
    echo "waited 1200 s: $* (logs: $scratch/log, $scratch/*.txt)" >&2
    return 1
}

await node_is_idle
sinfo

echo "== undisturbed, one process"
"$python" run.py "${sweep[@]}" out="$scratch/local" > "$scratch/local.txt" 2>&1

echo "== launch=slurm, two workers"
"$python" run.py "${sweep[@]}" out="$scratch/slurm" launch=slurm launch.workers=2 launch.time=60 > "$scratch/slurm.txt" 2>&1 &
driver=$!
await samples_are 1
victim=$(running | head -n 1)
echo "cancel array task $victim"
scancel "$victim"
await samples_are $(($(samples) + 2))
await kill_a_worker
status=0
wait "$driver" || status=$?
driver=
echo "exit code $status"
tail -n 12 "$scratch/slurm.txt"

echo "== wait=false: submit, end, and collect with the same command"
"$python" run.py "${sweep[@]}" out="$scratch/later" launch=slurm launch.workers=2 launch.time=60 launch.wait=false > "$scratch/later.txt" 2>&1
tail -n 4 "$scratch/later.txt"
await queue_is_empty
"$python" run.py "${sweep[@]}" out="$scratch/later" launch=slurm launch.workers=2 launch.time=60 launch.wait=false > "$scratch/later.txt" 2>&1
tail -n 4 "$scratch/later.txt"
await queue_is_empty
"$python" run.py "${sweep[@]}" out="$scratch/later" launch=slurm launch.workers=2 launch.time=60 > "$scratch/later.txt" 2>&1
tail -n 4 "$scratch/later.txt"

echo "== rows"
"$python" -m scripts.same_rows "$scratch/local" "$scratch/slurm"
"$python" -m scripts.same_rows "$scratch/local" "$scratch/later"
exit "$status"
