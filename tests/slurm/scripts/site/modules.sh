# What environment modules leave in a shell, for one module.
module() {
  if [[ $1 == load ]]; then
    export LOADEDMODULES=$2 PATH="$VENV/bin:$PATH"
  fi
}
