import pytest

from batchnorm.ops.cuda import driver, grouped, resident


@pytest.fixture(
    params=[pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def resident_device(request, emulation, monkeypatch):
    """Return the device for resident.cu: a GPU if there is one, or the CPU, where the kernel is emulated."""
    caches = (resident._kernel, resident.prepared, grouped._prepared)  # read now, before tests patch them

    def forget():
        for cache in caches:
            cache.cache_clear()

    if request.param == "cpu":
        if emulation is None:
            pytest.skip("no g++ that compiles the emulated kernel")
        forget()
        monkeypatch.setattr(driver, "load", emulation)
    yield request.param
    forget()
