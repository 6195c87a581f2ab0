#!/bin/bash
# A run on a Ray cluster of its own, inside a Slurm job:
#
#   sbatch --nodes=4 --gpus-per-node=8 examples/launch/slurm.sh --config-name NAME output=/shared/runs/NAME key=value ...
#
# Every node needs the same Python environment at the same path, and /shared. The first node also holds the driver.
# Slurm sends SIGTERM ten minutes before the job's time is over; the run then saves, and with REQUEUE=1 the job is queued
# again and resumes.
#SBATCH --job-name=rlframe
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@600
#SBATCH --time=24:00:00
set -euo pipefail

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head --lines=1)
# Its first address. Where the nodes reach each other at another one, set HEAD_ADDRESS before sbatch.
address=${HEAD_ADDRESS:-$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --all-ip-addresses | cut --delimiter=' ' --fields=1)}
port=$((20000 + SLURM_JOB_ID % 10000))
# Whoever reaches Ray's ports without the token can run nothing.
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
export HEAD_ADDRESS=$address HEAD_PORT=$port
# /tmp/ray may belong to another user of the node.
export RAY_TMPDIR=/tmp/ray-$SLURM_JOB_ID

# One task a node. Each holds the node's part of the Ray cluster until it is told to end.
# shellcheck disable=SC2016 # The tasks expand them.
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" --kill-on-bad-exit=0 bash -c '
    mkdir -p "$RAY_TMPDIR"
    if [ "$SLURM_NODEID" = 0 ]; then
        exec ray start --head --node-ip-address="$HEAD_ADDRESS" --port="$HEAD_PORT" --temp-dir="$RAY_TMPDIR" \
            --include-dashboard=false --disable-usage-stats --block
    fi
    until (exec 3<>"/dev/tcp/$HEAD_ADDRESS/$HEAD_PORT") 2>/dev/null; do sleep 1; done
    exec ray start --address="$HEAD_ADDRESS:$HEAD_PORT" --disable-usage-stats --block
' &
cluster=$!
until (exec 3<>"/dev/tcp/$address/$port") 2>/dev/null; do
    # An srun that has failed will start no Ray.
    kill -0 "$cluster"
    sleep 1
done

RAY_ADDRESS=$address:$port python -m rlframe.main "$@" &
driver=$!
trap 'kill -TERM "$driver"' TERM
code=0
wait "$driver" || code=$?
# A signal interrupts the wait; the run finishes its step and saves meanwhile.
while kill -0 "$driver" 2>/dev/null; do
    code=0
    wait "$driver" || code=$?
done

kill -TERM "$cluster" 2>/dev/null || true
wait "$cluster" || true
if [ "$code" = 143 ] && [ "${REQUEUE:-0}" = 1 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
