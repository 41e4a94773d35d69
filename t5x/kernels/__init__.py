"""What the networks and optimizers compute in different ways on different hardware.

`ops` has every such operation in plain XLA. `gpu_ops` and `tpu_ops` override what our kernels, or XLA with other
shapes, compute faster. `choice` picks the class for the devices of the current trace. `attention_inputs` describes the
mask and the bias of attention. The other modules are the kernels, which import Pallas and are loaded when needed.
"""
