# Sourced by scripts/gate and scripts/test: makes the project's virtual environment when it is missing or out of date.
# Sets: root (the repository), python (the environment's interpreter).

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="$root/.venv"
python="$venv/bin/python"

fail() {
  printf '%s: error: %s\n' "$(basename "$0")" "$*" >&2
  exit 2
}

# The interpreter to build with: $PYTHON, else the first on the PATH that is Python 3.10 to 3.13.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10 python}; do
    if command -v "$candidate" >/dev/null 2>&1 &&
      "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1; then
      command -v "$candidate"
      return 0
    fi
  done
  return 1
}

# ensure_env EXTRA: installs the package with its pinned dependencies and the extra ('' or 'dev'), once.
ensure_env() {
  local extra=$1 stamp wanted base
  stamp="$venv/.narrowgate-${extra:-run}"
  wanted=$(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum)
  if [ -x "$python" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    return 0
  fi
  if [ ! -x "$python" ]; then
    base=$(find_python) || fail "needs Python 3.10 to 3.13 on the PATH (or its path in \$PYTHON); found: $(python3 --version 2>&1 || echo none)"
    printf 'Making %s with %s ...\n' .venv "$("$base" --version)" >&2
    "$base" -m venv "$venv" || fail "could not make a virtual environment; on Debian and Ubuntu install python3-venv"
  fi
  printf 'Installing narrowgate%s (the first time takes a few minutes) ...\n' "${extra:+ with its $extra tools}" >&2
  # PyTorch first and by its exact version: a range would let pip take a newer release than the one pinned.
  "$python" -m pip install --quiet --disable-pip-version-check "$(grep '^torch==' "$root/constraints.txt")" &&
    "$python" -m pip install --quiet --disable-pip-version-check \
      --constraint "$root/constraints.txt" --editable "$root${extra:+[$extra]}" ||
    fail "installation failed; see pip's message above (no network? a proxy? disk full?)"
  printf '%s' "$wanted" >"$stamp"
}
