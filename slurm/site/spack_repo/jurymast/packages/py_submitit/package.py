"""For py-jurymast: Spack's own packages end with 1.4, others' executors are found since 1.5.2."""

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PySubmitit(PythonPackage):
    """Submits Python functions as jobs of Slurm and other clusters."""

    homepage = "https://github.com/facebookincubator/submitit"
    pypi = "submitit/submitit-1.5.4.tar.gz"

    license("MIT")

    version("1.5.4", sha256="7100848bd1cdda79c7196e54ee830793ae75fd7adde0c5bef738d72360a07508")

    depends_on("python@3.8:", type=("build", "run"))
    depends_on("py-flit-core@3.2:3", type="build")
    depends_on("py-cloudpickle@1.2.1:", type=("build", "run"))
    depends_on("py-typing-extensions@3.7.4.2:", type=("build", "run"))
