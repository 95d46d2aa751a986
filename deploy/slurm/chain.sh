#!/bin/bash
# chain.sh N [SBATCH OPTION ...] etc-run.sbatch train.py ...: N Slurm jobs, each after the one before it has ended in any
# way. Each looks at the verdict of that one, and ends at once where nothing is left to do. Prints their ids.
set -eu
count=$1
shift
after=
for ((link = 0; link < count; link++)); do
    dependency=${after:+--dependency=afterany:$after}
    # shellcheck disable=SC2086
    after=$(CHAIN_AFTER=$after sbatch --parsable --export=ALL $dependency "$@")
    echo "$after"
done
