
# The rest is the same in every script; docs/how_to/slurm.md explains it.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}}
job=${job:-$SLURM_JOB_ID}
requeues=${SLURM_RESTART_COUNT:-0}

pipeline() { "$python" "$entry" "$@"; }
say() { echo "$(date '+%F %T') job $job of $experiment, requeued $requeues of $max_requeues times: $*"; }
is_finished() { pipeline status "$experiment" --exit-code > /dev/null; }
# The controller of a cluster may be busy or away for a moment.
insist() { for _ in 1 2 3 4; do "$@" && return; sleep 5; done; return 1; }
standing() { insist squeue --noheader --jobs "$job" --format '%T %r'; }
num_starts() { cat "$starts_file" 2> /dev/null | wc -l; }
# A run under preemption is signalled by Slurm itself, which tells the batch script nothing.
was_signalled() {
    [ "$(num_starts)" -gt "$starts_before" ] &&
        pipeline status "$experiment" --lines 0 | grep -q '^  ended  *stopped: SIG'
}
# A dead node is known to Slurm only after a while; what ran on the others has failed long before.
has_lost_a_node() { ! timeout 60 srun --overlap --ntasks-per-node=1 --kill-on-bad-exit=1 true; }
# A cancelled job is on its way out, and must not come back; Slurm requeues a preempted one itself.
may_be_requeued() { [[ $(standing) =~ ^RUNNING|TimeLimit$ ]]; }
last_commit() { cat "$state_file" 2> /dev/null | cksum; }

requeue() {
    if ! may_be_requeued; then
        say "$1; left to Slurm, which has ended the job"
    elif [ "$requeues" -ge "$max_requeues" ]; then
        say "$1; not requeued: the limit is reached"
    elif [ "$SECONDS" -ge $((seconds / 2)) ] && [ "$(last_commit)" = "$commit_before" ]; then
        say "$1; not requeued: nothing was committed, and a longer --time is needed"
    else
        say "$1; requeued"
        insist scontrol requeue "$job"
        wait "$step"
    fi
    # Only a finished experiment ends with 0, which is what a job that comes after this one waits for.
    exit 1
}

ask_to_stop() {
    was_asked=yes
    say "the job must end, so the run is asked to finish its step"
    # Again and again: a run that is just starting does not hear yet.
    while kill -0 "$step" 2> /dev/null && [[ $(standing) == RUNNING* ]]; do
        pipeline stop "$experiment" > /dev/null 2>&1
        sleep 2
    done
}

if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    # The script runs on the first node, which is where the processes of all nodes meet.
    port=$("$python" -c 'import socket; one = socket.socket(); one.bind(("", 0)); print(one.getsockname()[1])')
    PET_RDZV_ENDPOINT=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):$port
    export PET_RDZV_ENDPOINT PET_RDZV_ID="$job-$requeues"
fi

say "started on $SLURM_JOB_NODELIST"
commit_before=$(last_commit)
starts_before=$(num_starts)
was_asked=
trap 'was_asked=yes' USR1 TERM
srun --ntasks-per-node=1 --cpus-per-task="$cpus_per_task" --kill-on-bad-exit=1 "${container[@]}" "${training[@]}" &
step=$!
trap ask_to_stop USR1 TERM
[ -z "$was_asked" ] || ask_to_stop
wait "$step"
code=$?

if is_finished; then
    say "finished"
    exit 0
elif [ -n "$was_asked" ]; then
    requeue "stopped before the end of the job"
elif was_signalled; then
    requeue "stopped by a signal"
elif [ "$code" -ne 0 ] && has_lost_a_node; then
    requeue "a node does not answer"
fi
say "ended with code $code, unfinished; not requeued"
exit $((code > 0 ? code : 1))
