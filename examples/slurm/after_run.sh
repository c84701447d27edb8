# Sourced by the batch scripts: what becomes of the job when its ranks have ended.
#
# Status of the run   meaning                                  the job
# 0                   all iterations are done                  ends
# STOPPED             asked to stop, has saved                 goes back into the queue
# 2, 3                bad input; too many skipped updates      ends: somebody has to look
# any other           a rank failed, or a node was lost        goes back, MAX_FAILURES times in a row

STOPPED=85

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
    local status="$1" failures="$RUN_DIR/failures_in_a_row" count
    case "$status" in
        0)
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
            count=$(($(cat "$failures" 2>/dev/null || echo 0) + 1))
            if ((count > MAX_FAILURES)); then
                rm -f "$failures"
                echo "[job] failed $count times in a row (MAX_FAILURES=$MAX_FAILURES): not requeued"
            else
                mkdir -p "$RUN_DIR" && echo "$count" >"$failures"
                requeue "failed with status $status, $count in a row"
            fi
            ;;
    esac
    exit "$status"
}

requeue() {
    echo "[job] $1: back into the queue"
    # Refused where Slurm has requeued the job already: preempted, or a node is down.
    scontrol requeue "$SLURM_JOB_ID" || true
}
