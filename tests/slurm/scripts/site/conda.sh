# What conda leaves of itself in a shell, for one environment.
conda() {
  if [[ $1 == activate ]]; then
    export CONDA_DEFAULT_ENV=$2 PATH="$VENV/bin:$PATH"
  fi
}
