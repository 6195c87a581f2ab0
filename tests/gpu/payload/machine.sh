#!/usr/bin/env bash
# Steps on a lent GPU machine, which starts bare and is given back when no call comes for half a minute: send the next
# `wait` together with whatever is read meanwhile.
#
#     cp .gpu/0/part* ~/parts/                              one call for each part of payload.py, 48 MB each
#     bash tests/gpu/payload/machine.sh site                unpacks them into ~/site, and goes on when the call has ended
#     bash tests/gpu/payload/machine.sh overlay             unpacks .gpu/over and .gpu/peers, if they were carried, and
#                                                           sglang.py's parts, if they are in ~/sglang
#     bash tests/gpu/payload/machine.sh memory 64           uses 64 GB of memory once: that of an H200 machine grows with
#                                                           use, and everything stands still while it does
#     bash tests/gpu/payload/machine.sh queue PLAN 1200     starts jobs.py in a copy of the checkout, for 1,200 seconds
#     bash tests/gpu/payload/machine.sh wait 500            waits so long, or until the queue ends, and copies to $OUT
#     bash tests/gpu/payload/machine.sh stop                kills the queue and its jobs
set -eu

running() { pgrep -f "[p]ayload/jobs.py" > /dev/null; }

case "$1" in
site)
    mkdir -p ~/site
    setsid nohup bash -c 'cat ~/parts/part* | xz -dc -T8 | tar x -C ~/site
        python3 -m compileall -q -j 16 ~/site || true
        touch ~/site.done' > ~/site.log 2>&1 < /dev/null &
    sleep 1
    ;;
overlay)
    mkdir -p ~/overlay ~/peers_site ~/sglang_site
    if [ -d .gpu/over ]; then tar xJf .gpu/over/part0 -C ~/overlay; fi
    if [ -d .gpu/peers ]; then cat .gpu/peers/*/part* | xz -dc -T8 | tar x -C ~/peers_site; fi
    if [ -d ~/sglang ]; then
        setsid nohup bash -c 'cat ~/sglang/part* | xz -dc -T8 | tar x -C ~/sglang_site
            python3 -m compileall -q -j 16 ~/sglang_site || true
            touch ~/sglang.done' > ~/sglang.log 2>&1 < /dev/null &
    fi
    ;;
memory)
    # A process for each 8 GB.
    seq $(($2 / 8)) | xargs -P 64 -I{} python3 -c 'memory = bytearray(8 << 30); memory[::4096] = bytes(len(memory[::4096]))'
    grep -E "MemTotal|MemFree" /proc/meminfo
    ;;
queue)
    while [ ! -e ~/site.done ] || { [ -d ~/sglang ] && [ ! -e ~/sglang.done ]; }; do sleep 1; done
    rm -rf ~/repo
    cp -r . ~/repo
    cd ~/repo
    mkdir -p ~/keep
    setsid nohup python3 tests/gpu/payload/jobs.py "$2" ~/keep --limit-s "$3" > ~/queue.log 2>&1 < /dev/null &
    sleep 2
    ;;
wait)
    end=$((SECONDS + $2))
    while [ $SECONDS -lt $end ] && running; do sleep 1; done
    if running; then echo "the queue goes on"; else echo "the queue has ended"; fi
    tail -c 8000 ~/queue.log | cut -c1-600
    cp ~/keep/* "$OUT"
    ;;
stop)
    pkill -9 -f "[p]ayload/jobs.py" || true
    for environment in $(grep -lz "^RLFRAME_GPU_JOB=" /proc/[0-9]*/environ 2> /dev/null || true); do
        kill -9 "$(echo "$environment" | cut -d/ -f3)" 2> /dev/null || true
    done
    ;;
*)
    echo "unknown step $1" >&2
    exit 2
    ;;
esac
