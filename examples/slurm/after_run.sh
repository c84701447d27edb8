# Sourced by the batch scripts: what becomes of the job when its ranks have ended.
#
# Status of the run   meaning                                  the job
# 0                   all iterations are done                  ends
# STOPPED             asked to stop, has saved                 goes back into the queue
# 2, 3                bad input; too many skipped updates      ends: somebody has to look
# 138, 143            asked to stop before it could listen     goes back into the queue
# any other           a rank failed, or a node was lost        goes back, MAX_FAILURES times without
#                                                              a newer checkpoint in between
STOPPED=85
# As squeue names it.
JOB="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}"
JOB="${JOB:-$SLURM_JOB_ID}"

# Waits for a process although signals interrupt the shell's wait. Its status.
wait_for() {
    local status again
    while true; do
        wait "$1"
        status=$?
        kill -0 "$1" 2>/dev/null || break
    done
    # A signal at the moment of the end hides the status, which the shell remembers; 127: it does not.
    wait "$1" 2>/dev/null
    again=$?
    return "$((again == 127 ? status : again))"
}

after_run() {
    local status="$1" failures="$RUN_DIR/failures_in_a_row" newest before="" count=0
    # srun says 0 as well when Slurm ends the job and it gives up waiting for its ranks.
    if ((status == 0)) && ! tail -n 1 "$RUN_DIR/events.jsonl" 2>/dev/null | grep -q '"kind": "end"'; then
        status="$STOPPED"
    fi
    case "$status" in
        0)
            rm -f "$failures"
            echo "[job] done"
            ;;
        "$STOPPED")
            rm -f "$failures"
            requeue "stopped in order"
            ;;
        138 | 143)
            requeue "stopped before it began"
            ;;
        2 | 3)
            echo "[job] status $status: not requeued, somebody has to look"
            ;;
        *)
            newest="$(cat "$RUN_DIR/checkpoints/latest" 2>/dev/null)"
            [[ -f "$failures" ]] && read -r count before <"$failures"
            # What is in a file is not evaluated unless it is a number.
            [[ "$newest" == "$before" && "$count" =~ ^[0-9]+$ ]] || count=0
            count=$((count + 1))
            if ((count > MAX_FAILURES)); then
                rm -f "$failures"
                echo "[job] failed with status $status, $count times without progress: not requeued"
            elif ! { mkdir -p "$RUN_DIR" && echo "$count $newest" >"$failures"; }; then
                echo "[job] failed with status $status; $failures cannot be written: not requeued"
            else
                requeue "failed with status $status, $count of $MAX_FAILURES tries without progress"
            fi
            ;;
    esac
    exit "$status"
}

requeue() {
    case "$(scontrol --oneliner show job "$SLURM_JOB_ID" 2>/dev/null)" in
        *JobState=RUNNING*)
            echo "[job] $1: back into the queue"
            scontrol requeue "$SLURM_JOB_ID"
            ;;
        *)
            echo "[job] $1, and ended by Slurm: a preempted job or one that lost a node comes back," \
                "a cancelled one does not"
            ;;
    esac
}
