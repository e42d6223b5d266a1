"""A recurrent network that reads a window of a series and predicts the next value."""

from torch import Tensor, nn


class Forecaster(nn.Module):
    """One LSTM layer and a linear head on its last step."""

    def __init__(self, hidden: int) -> None:
        """Make the layers; `hidden` units in the LSTM."""
        super().__init__()
        self.lstm = nn.LSTM(1, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 1)

    def forward(self, windows: Tensor) -> Tensor:
        """Predict: windows (n, t, 1) -> next values (n, 1)."""
        states, _ = self.lstm(windows)
        prediction: Tensor = self.head(states[:, -1])
        return prediction


def build(hidden: int = 32) -> nn.Module:
    """Build the network: windows (n, t, 1) -> next values (n, 1).

    Args:
        hidden: Units in the LSTM.
    """
    return Forecaster(hidden)
