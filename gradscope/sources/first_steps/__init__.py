"""The model, the data and the loss of a training script, taken from its own first steps.

The script is run as `python FILE.py ARGUMENTS` would run it, until its second training step. At
the first call of backward(), the loops over batches are found in the stack. At the next round of a
loop, its variables are recorded: the batch, and everything that the lines of the loop read. At the
next step of an optimizer the script is ended. The lines of the loop, up to backward(), are then the
loss, for one sample at a time.
"""

from gradscope.sources.first_steps.choice import Step
from gradscope.sources.first_steps.files import files_restored
from gradscope.sources.first_steps.watch import FirstSteps

__all__ = ["FirstSteps", "Step", "files_restored"]
