# Sourced by the scripts beside it. Makes the repository's own virtual environment, .venv, and keeps it up to date.
# shellcheck shell=bash

# Extras of pyproject.toml: what training on prepared text needs, and what all tests and checks need.
# Read by the scripts that source this file.
# shellcheck disable=SC2034
readonly FOR_TRAINING=train,data
readonly FOR_TESTS=train,data,remote,clean,clean-cluster,eval,dev
# Where torch's builds without CUDA are.
readonly CPU_INDEX=https://download.pytorch.org/whl/cpu

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
            3.14) found+=" $candidate is 3.14, for which the numpy below 2.2 that mosaicml-streaming wants has no wheel;" ;;
            *) found+=" $candidate is $version;" ;;
        esac
    done
    echo "error: llmscale needs Python 3.10, 3.11, 3.12 or 3.13.${found:- No Python was found;}" \
        "install one, or name it: PYTHON=/path/to/python3.11 $0" >&2
    return 1
}

# Make .venv or bring it up to date, and put it first on the PATH. $1: the extras that it needs; one that has the tests'
# keeps them. Does nothing when what it was made from is unchanged.
ensure_environment() {
    local extras=$1 stamp=.venv/installed-from made_from="" files python
    # The place counts: a virtual environment that was moved runs the Python of the old place.
    if [[ -f $stamp ]]; then made_from=$(<"$stamp"); fi
    if [[ $made_from == "$PWD"$'\n'"$FOR_TESTS"$'\n'* ]]; then extras=$FOR_TESTS; fi
    files=$(cat pyproject.toml constraints.txt)
    if [[ $made_from != "$PWD"$'\n'"$extras"$'\n'"$files" ]] || ! .venv/bin/python -c '' 2>/dev/null; then
        python=$(find_python)
        echo "== Installing into .venv with $python (a few minutes the first time)"
        if [[ $made_from != "$PWD"$'\n'* ]] || ! .venv/bin/python -c '' 2>/dev/null; then
            "$python" -m venv --clear .venv
        fi
        rm -f "$stamp"
        .venv/bin/python -m pip install -qq --disable-pip-version-check --editable ".[$extras]" --constraint constraints.txt
        remove_broken_torchvision
        printf '%s\n' "$PWD" "$extras" "$files" >"$stamp"
    fi
    export VIRTUAL_ENV=$PWD/.venv PATH=$PWD/.venv/bin:$PATH
    unset PYTHONHOME PYTHONPATH
}

# Streaming brings torchvision. PyPI's does not load beside a torch without CUDA, and takes transformers with it, which
# does without.
remove_broken_torchvision() {
    if .venv/bin/python -c 'import torchvision' >/dev/null 2>&1; then
        return
    fi
    .venv/bin/python -m pip uninstall -qq --yes torchvision
    echo "Removed torchvision: PyPI's needs CUDA, and this torch has none. llmscale does without it; a program with" \
        "'import streaming' needs: .venv/bin/pip install torchvision --constraint constraints.txt --index-url $CPU_INDEX"
}
