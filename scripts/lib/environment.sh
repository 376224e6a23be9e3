# Sourced by the scripts beside it. Makes the repository's own virtual environment, .venv, and keeps it up to date.
# shellcheck shell=bash

# The first Python in the supported range, or the one that $PYTHON names. Prints its path.
find_python() {
    local candidate version found=""
    for candidate in ${PYTHON:-python3 python python3.13 python3.12 python3.11 python3.10}; do
        # A version manager's stand-in may be on the PATH for a Python that is not there: ask it to run.
        version=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
        case $version in
            3.10 | 3.11 | 3.12 | 3.13)
                if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
                    # Of a virtual environment the Python it was made of: it may be the one that is made anew.
                    "$candidate" -c 'import sys; print(getattr(sys, "_base_executable", sys.executable))'
                    return
                fi
                found+=" $candidate is $version but has no venv module (Debian: apt install python$version-venv);"
                ;;
            *) found+=" $candidate is $version;" ;;
        esac
    done
    echo "error: llmscale needs Python 3.10, 3.11, 3.12 or 3.13.${found:- No Python was found;}" \
        "install one, or name it: PYTHON=/path/to/python3.11 $0" >&2
    return 1
}

# Make .venv or bring it up to date, and put it first on the PATH. Does nothing when what it was made from is unchanged.
ensure_environment() {
    local stamp=.venv/installed-from made_from python
    # The place counts: a virtual environment that was moved runs the Python of the old place.
    made_from=$(pwd && cat pyproject.toml constraints.txt)
    if [[ ! -f $stamp || $(<"$stamp") != "$made_from" ]] || ! .venv/bin/python -c '' 2>/dev/null; then
        python=$(find_python)
        echo "== Installing into .venv with $python (a few minutes the first time)"
        if [[ ! -f $stamp || $(head -n 1 "$stamp") != "$PWD" ]]; then
            "$python" -m venv --clear .venv
        fi
        rm -f "$stamp"
        .venv/bin/python -m pip install -qq --disable-pip-version-check \
            --editable '.[train,data,remote,clean,clean-cluster,eval,dev]' --constraint constraints.txt
        printf '%s\n' "$made_from" >"$stamp"
    fi
    export VIRTUAL_ENV=$PWD/.venv PATH=$PWD/.venv/bin:$PATH
    unset PYTHONHOME PYTHONPATH
}
