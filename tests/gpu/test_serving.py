"""A model on a GPU answers as on a CPU."""

import pytest

from rekindle.release.device import move_model

pytestmark = pytest.mark.gpu


def test_a_model_on_the_device_accepts_and_returns_tensors_of_the_cpu(device: str) -> None:
    import torch

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    inputs = torch.randn(16, 8)
    with torch.inference_mode():
        expected = model(inputs)
        answers = move_model(model, torch.device(device))(inputs)

    assert answers.device.type == "cpu"
    assert all(parameter.device.type == device for parameter in model.parameters())
    torch.testing.assert_close(answers, expected)


def test_two_calls_with_the_same_inputs_give_the_same_bits(device: str) -> None:
    import torch

    model = move_model(torch.nn.Linear(64, 64), torch.device(device))
    inputs = torch.randn(128, 64)
    with torch.inference_mode():
        assert torch.equal(model(inputs), model(inputs))
