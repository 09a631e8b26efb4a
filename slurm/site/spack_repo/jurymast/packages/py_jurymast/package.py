"""Spack's package of jurymast, over the source distribution of `make package` in a mirror:

    spack repo add slurm/site/spack_repo/jurymast
    spack mirror add jurymast DIRECTORY     # with py-jurymast/py-jurymast-VERSION.tar.gz
    spack install --only dependencies py-jurymast
    spack install --no-checksum py-jurymast

The last command alone would leave all sources unchecked. py-msgspec and py-submitit are beside it,
since Spack's own packages lack the one and have only older releases of the other.
"""

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyJurymast(PythonPackage):
    """A resilient job launcher for Slurm clusters that train large models."""

    homepage = "https://pypi.org/project/jurymast"
    pypi = "jurymast/jurymast-0.1.0.tar.gz"

    license("Apache-2.0")

    version("0.1.0")

    variant("nvidia", default=False, description="The probe of NVIDIA GPUs")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-hatchling@1.24:", type="build")

    depends_on("py-click@8.1:", type=("build", "run"))
    depends_on("py-cryptography@42:", type=("build", "run"))
    depends_on("py-jinja2@3.1:", type=("build", "run"))
    depends_on("py-msgspec@0.19:", type=("build", "run"))
    depends_on("py-psutil@5.9:", type=("build", "run"))
    depends_on("py-pydantic@2.6:", type=("build", "run"))
    depends_on("py-pyyaml@6.0:", type=("build", "run"))
    depends_on("py-rich@13.7:", type=("build", "run"))
    depends_on("py-submitit@1.5.2:", type=("build", "run"))
    depends_on("py-xxhash@3.4:", type=("build", "run"))

    # What trains: jurymast belongs to the Python that has it.
    depends_on("py-torch@2.6:", type="run")
    depends_on("py-nvidia-ml-py@12.560:", type="run", when="+nvidia")

    import_modules = ["jurymast", "jurymast.cli", "jurymast.core"]

    def setup_run_environment(self, env: EnvironmentModifications) -> None:
        # Where shells look for completions.
        env.prepend_path("XDG_DATA_DIRS", self.prefix.share)
