# Sourced by other scripts. Creates the repository's virtual environment, .venv, and keeps it up to date.
# shellcheck shell=bash

# Extras of pyproject.toml for training on prepared text, and for all tests and checks.
# Read by the scripts that source this file.
# shellcheck disable=SC2034
readonly FOR_TRAINING=train,data
readonly FOR_TESTS=train,data,remote,clean,clean-cluster,eval,dev
# Package index of torch's builds without CUDA.
readonly CPU_INDEX=https://download.pytorch.org/whl/cpu

# Print the path of the first Python in the supported range, or of the one that $PYTHON names.
find_python() {
    local candidate version found=""
    for candidate in ${PYTHON:-python3 python python3.13 python3.12 python3.11 python3.10}; do
        # A version manager may put a stand-in for a missing Python on the PATH: run it to find out.
        version=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
        case $version in
            3.10 | 3.11 | 3.12 | 3.13)
                if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
                    # For a virtual environment, the Python that created it: the environment may be created again.
                    "$candidate" -c 'import sys; print(getattr(sys, "_base_executable", sys.executable))'
                    return
                fi
                found+=" $candidate is $version but has no venv module (Debian: apt install python$version-venv);"
                ;;
            3.14) found+=" $candidate is 3.14; mosaicml-streaming needs numpy below 2.2, which has no wheel for it;" ;;
            *) found+=" $candidate is $version;" ;;
        esac
    done
    echo "error: llmscale needs Python 3.10, 3.11, 3.12 or 3.13.${found:- No Python was found;}" \
        "install one, or give its path: PYTHON=/path/to/python3.11 $0" >&2
    return 1
}

# Create or update .venv, and put it first on the PATH. $1: its extras; an environment with those of the tests keeps
# them. Does nothing if pyproject.toml, constraints.txt, the extras and the folder are unchanged.
ensure_environment() {
    local extras=$1 stamp=.venv/installed-from made_from="" files python
    # The folder matters: a virtual environment that was moved runs the Python of the old folder.
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

# Streaming depends on torchvision. PyPI's build fails to load beside a torch without CUDA, and transformers fails with
# it, although it does not need torchvision.
remove_broken_torchvision() {
    if .venv/bin/python -c 'import torchvision' >/dev/null 2>&1; then
        return
    fi
    .venv/bin/python -m pip uninstall -qq --yes torchvision
    echo "Removed torchvision: PyPI's build needs CUDA, and this torch has none. llmscale does not need it. For a" \
        "program with 'import streaming': .venv/bin/pip install torchvision --constraint constraints.txt --index-url $CPU_INDEX"
}
