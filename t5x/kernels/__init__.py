"""What the networks and optimizers compute in different ways on different hardware.

`ops` has every such operation in plain XLA and chooses a subclass for the devices of the current trace: `gpu_ops` and
`tpu_ops` override what our kernels, or XLA with other shapes, compute faster. `attention_inputs` describes the mask and
the bias of attention. The other modules are the kernels, which import Pallas and are therefore loaded when needed.
"""
