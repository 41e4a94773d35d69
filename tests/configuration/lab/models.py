class EncoderDecoderModel:
    def __init__(self, module, input_vocabulary, z_loss: float = 0.0, label_smoothing: float = 0.0):
        self.module, self.input_vocabulary, self.z_loss = module, input_vocabulary, z_loss

    def predict_batch_with_aux(self, batch, num_decodes: int = 1, return_all_decodes: bool = False):
        return batch, num_decodes


def beam_search(inputs, alpha: float = 0.6):
    return inputs, alpha
