import pytest
from training import striped_folder


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Save generated images of three classes: 30 for training and 12 for validation."""
    return striped_folder(tmp_path_factory.mktemp("stripes"))


@pytest.fixture(scope="module")
def plan(request, tmp_path_factory):
    """Write the test module's PLAN to a file."""
    path = tmp_path_factory.mktemp("plan") / "plan.toml"
    path.write_text(request.module.PLAN)
    return path
