# Sourced by the batch scripts: what becomes of the job when its ranks have ended.
#
# Status of the run   meaning                                  the job
# 0                   all iterations are done                  ends
# STOPPED             asked to stop, has saved                 goes back into the queue
# 2, 3                bad input; too many skipped updates      ends: somebody has to look
# any other           a rank failed, or a node was lost        goes back, MAX_FAILURES times without
#                                                              a newer checkpoint in between
STOPPED=85
# As squeue names it.
JOB="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}"
JOB="${JOB:-$SLURM_JOB_ID}"

# Waits for a process although signals interrupt the shell's wait. Its status.
wait_for() {
    local status
    while true; do
        wait "$1"
        status=$?
        kill -0 "$1" 2>/dev/null || return "$status"
    done
}

after_run() {
    local status="$1" failures="$RUN_DIR/failures_in_a_row" newest before="" count=0
    case "$status" in
        0)
            rm -f "$failures"
            echo "[job] done"
            ;;
        "$STOPPED")
            rm -f "$failures"
            requeue "stopped in order"
            ;;
        2 | 3)
            echo "[job] status $status: not requeued, somebody has to look"
            ;;
        *)
            newest="$(cat "$RUN_DIR/checkpoints/latest" 2>/dev/null)"
            [[ -f "$failures" ]] && read -r count before <"$failures"
            [[ "$newest" == "$before" ]] || count=0
            count=$((count + 1))
            if ((count > MAX_FAILURES)); then
                rm -f "$failures"
                echo "[job] failed with status $status, $count times without progress: not requeued"
            else
                mkdir -p "$RUN_DIR" && echo "$count $newest" >"$failures"
                requeue "failed with status $status, $count of $MAX_FAILURES tries without progress"
            fi
            ;;
    esac
    exit "$status"
}

requeue() {
    echo "[job] $1: back into the queue"
    scontrol requeue "$SLURM_JOB_ID" 2>/dev/null ||
        echo "[job] Slurm has requeued it already: preempted, or a node is down"
}
