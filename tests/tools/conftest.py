"""One thread for models this small."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def calling_folder(tmp_path_factory):
    """A saved policy that calls the calculator about every other time (``calling_policy``)."""
    from calling_policy import TOKENIZER, calling_policy

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("policy")
    calling_policy().save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    torch.set_num_threads(before)
    return folder
