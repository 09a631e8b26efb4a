help([[jurymast: runs trainings on Slurm so that they survive failures of nodes, GPUs and storage.

    jurymast submit --spares 2 job.sbatch
]])
whatis("Name: jurymast")
whatis("Description: a resilient job launcher for Slurm clusters that train large models")
conflict("jurymast")

-- As PREFIX/modulefiles/jurymast/VERSION.lua, where `pip install --prefix PREFIX/jurymast/VERSION` put it, and
-- with the Python that did so.
local version = myModuleVersion()
local prefix = pathJoin(myFileName():match("^(.*)/modulefiles/"), "jurymast", version)
local found = subprocess("ls -d " .. prefix .. "/lib/python3.*/site-packages"):match("%S+")
prepend_path("PATH", pathJoin(prefix, "bin"))
prepend_path("PYTHONPATH", found)
prepend_path("MANPATH", pathJoin(prefix, "share/man"))
if not os.getenv("XDG_DATA_DIRS") then
    append_path("XDG_DATA_DIRS", "/usr/local/share:/usr/share") -- what an unset one stands for
end
prepend_path("XDG_DATA_DIRS", pathJoin(prefix, "share"))
