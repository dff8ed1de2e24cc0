"""Classes with the names, attributes, state dicts and results of VQGAN's line, whose libraries are no packages.

taming-transformers (VectorQuantizer, VectorQuantizer2), SEED-Voken (VectorQuantizer2, IndexPropagationQuantize) and
LlamaGen (VectorQuantizer). Nothing here knows topovq: the tests of the way back import it where topovq is missing.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Embedded(nn.Module):
    """An embedding, feature maps in and out, the straight-through gradient."""

    def __init__(self, n_e, e_dim, beta):
        super().__init__()
        self.n_e, self.e_dim, self.beta = n_e, e_dim, beta
        self.embedding = nn.Embedding(n_e, e_dim)

    def closest(self, z_NC, codes_KC):
        return (z_NC[:, None] - codes_KC).square().sum(-1).argmin(1)

    def straight_through(self, z_BHWC, q_BHWC):
        return (z_BHWC + (q_BHWC - z_BHWC).detach()).permute(0, 3, 1, 2)


class Remapping(Embedded):
    """With a file of the codes in use, tokens count only those."""

    def __init__(self, n_e, e_dim, beta, used, unknown_index):
        super().__init__(n_e, e_dim, beta)
        self.remap = None if used is None else "used.npy"
        self.re_embed = n_e
        if used is not None:
            self.register_buffer("used", torch.tensor(used))
            self.re_embed, self.unknown_index = len(used), unknown_index
            if unknown_index == "extra":
                self.re_embed, self.unknown_index = len(used) + 1, len(used)

    def remap_to_used(self, inds):
        new = []
        for token in inds.flatten().tolist():
            place = (self.used == token).nonzero()
            if len(place):
                new.append(int(place[0]))
            else:
                random = self.unknown_index == "random"
                new.append(int(torch.randint(self.re_embed, ())) if random else self.unknown_index)
        return torch.tensor(new).view(inds.shape)

    def unmap_to_all(self, inds):
        return self.used[torch.where(inds < len(self.used), inds, 0)]

    def get_codebook_entry(self, indices, shape):
        indices = indices if self.remap is None else self.unmap_to_all(indices)
        q = self.embedding(indices)
        return q if shape is None else q.view(shape).permute(0, 3, 1, 2).contiguous()


class _Legacy(Remapping):
    def __init__(self, n_e, e_dim, beta, used=None, unknown_index="random", sane_index_shape=False, legacy=True):
        super().__init__(n_e, e_dim, beta, used, unknown_index)
        self.sane_index_shape, self.legacy = sane_index_shape, legacy

    def forward(self, z, temp=None, rescale_logits=False, return_logits=False):
        z = z.permute(0, 2, 3, 1)
        z_NC, codes_KC = z.reshape(-1, self.e_dim), self.embedding.weight
        if getattr(self, "l2_normalize", False):
            z_NC, codes_KC = F.normalize(z_NC), F.normalize(codes_KC)
        tokens = self.closest(z_NC, codes_KC)
        q = self.embedding(tokens).view(z.shape)
        to_encoder, to_codes = F.mse_loss(z, q.detach()), F.mse_loss(q, z.detach())
        loss = to_encoder + self.beta * to_codes if self.legacy else self.beta * to_encoder + to_codes
        if self.remap is not None:
            tokens = self.remap_to_used(tokens)[:, None]
        if self.sane_index_shape:
            tokens = tokens.view(z.shape[:3])
        return self.straight_through(z, q).contiguous(), loss, (None, None, tokens)


class Taming:
    class VectorQuantizer(Embedded):
        def forward(self, z):
            z = z.permute(0, 2, 3, 1)
            tokens = self.closest(z.reshape(-1, self.e_dim), self.embedding.weight)
            choices_NK = F.one_hot(tokens, self.n_e).to(z)
            q = (choices_NK @ self.embedding.weight).view(z.shape)
            loss = F.mse_loss(z, q.detach()) + self.beta * F.mse_loss(q, z.detach())
            share_K = choices_NK.mean(0)
            perplexity = (-(share_K * (share_K + 1e-10).log()).sum()).exp()
            return self.straight_through(z, q).contiguous(), loss, (perplexity, choices_NK, tokens[:, None])

        def get_codebook_entry(self, indices, shape):
            q = self.embedding(indices)
            return q if shape is None else q.view(shape).permute(0, 3, 1, 2).contiguous()

    class VectorQuantizer2(_Legacy):
        pass


class SeedVoken:
    class VectorQuantizer2(_Legacy):
        def __init__(self, *args, l2_normalize=False, **options):
            super().__init__(*args, **options)
            self.l2_normalize = l2_normalize

    class IndexPropagationQuantize(Remapping):
        def __init__(self, n_e, e_dim, beta=0.25, use_entropy_loss=False, used=None, unknown_index="random"):
            super().__init__(n_e, e_dim, beta, used, unknown_index)
            self.use_entropy_loss, self.cosine_similarity, self.entropy_temperature = use_entropy_loss, False, 0.5
            self.sample_minimization_weight, self.batch_maximization_weight = 0.7, 1.2

        def forward(self, z, temp=None, return_logits=False):
            z_NC = z.permute(0, 2, 3, 1).reshape(-1, self.e_dim)
            logits_NK = z_NC @ self.embedding.weight.T
            soft_NK = logits_NK.softmax(1)
            tokens = soft_NK.argmax(1)
            hard_NK = F.one_hot(tokens, self.n_e).to(z)
            q_NC = (hard_NK - soft_NK.detach() + soft_NK) @ self.embedding.weight
            hard_q_NC = self.embedding(tokens)
            loss = F.mse_loss(q_NC, z_NC) + F.mse_loss(z_NC, hard_q_NC.detach())
            loss = loss + self.beta * F.mse_loss(hard_q_NC, z_NC.detach())
            q = q_NC.view(z.shape[0], *z.shape[2:], -1).permute(0, 3, 1, 2)
            if self.use_entropy_loss:
                soft_NK = (logits_NK / self.entropy_temperature).softmax(1)
                sample = -(soft_NK * soft_NK.log()).sum(1).mean()
                mean = -(soft_NK.mean(0) * (soft_NK.mean(0) + 1e-5).log()).sum()
                loss = (
                    loss,
                    sample,
                    mean,
                    self.sample_minimization_weight * sample - self.batch_maximization_weight * mean,
                )
            return q, loss, (None, None, tokens)


class LlamaGen:
    class VectorQuantizer(Embedded):
        def __init__(self, n_e, e_dim, beta, entropy_loss_ratio=0.0, l2_norm=False, show_usage=False):
            super().__init__(n_e, e_dim, beta)
            self.entropy_loss_ratio, self.l2_norm, self.show_usage = entropy_loss_ratio, l2_norm, show_usage
            if show_usage:
                self.register_buffer("codebook_used", nn.Parameter(torch.zeros(48)))  # theirs is a parameter, too

        def codes(self):
            return F.normalize(self.embedding.weight) if self.l2_norm else self.embedding.weight

        def forward(self, z):
            z = z.permute(0, 2, 3, 1)
            z = F.normalize(z, dim=-1) if self.l2_norm else z
            z_NC = z.reshape(-1, self.e_dim)
            tokens = self.closest(z_NC, self.codes())
            q = self.codes()[tokens].view(z.shape)
            losses = (None, None, None, 0)
            if self.training:
                usage = 0
                if self.show_usage:
                    self.codebook_used = torch.cat([self.codebook_used.detach(), tokens.float()])[-48:]
                    usage = len(self.codebook_used.unique()) / self.n_e
                affinity_NK = (z_NC[:, None] - self.codes()).square().sum(-1) / -0.01
                mean_K = affinity_NK.softmax(1).mean(0)
                sample = -(affinity_NK.softmax(1) * affinity_NK.log_softmax(1)).sum(1).mean()
                entropy = sample + (mean_K * (mean_K + 1e-5).log()).sum()
                losses = (
                    F.mse_loss(q, z.detach()),
                    self.beta * F.mse_loss(z, q.detach()),
                    self.entropy_loss_ratio * entropy,
                    usage,
                )
            return self.straight_through(z, q), losses, (None, None, tokens)

        def get_codebook_entry(self, indices, shape=None, channel_first=True):
            q = self.codes()[indices]
            if shape is None:
                return q
            if not channel_first:
                return q.view(shape)
            return q.view(shape[0], shape[2], shape[3], shape[1]).permute(0, 3, 1, 2).contiguous()


USED = [3, 5, 7, 11, 2, 9]
CASES = {
    "taming 1": lambda: Taming.VectorQuantizer(16, 4, 0.25),
    "taming 2": lambda: Taming.VectorQuantizer2(16, 4, 0.25),
    "taming 2 fixed, sane": lambda: Taming.VectorQuantizer2(16, 4, 0.25, legacy=False, sane_index_shape=True),
    "taming 2 remapped, extra": lambda: Taming.VectorQuantizer2(16, 4, 0.25, USED, "extra"),
    "taming 2 remapped, 1, sane": lambda: Taming.VectorQuantizer2(16, 4, 0.25, USED, 1, sane_index_shape=True),
    "SEED-Voken 2": lambda: SeedVoken.VectorQuantizer2(16, 4, 0.25),
    "SEED-Voken 2 by direction": lambda: SeedVoken.VectorQuantizer2(16, 4, 0.25, legacy=False, l2_normalize=True),
    "IBQ": lambda: SeedVoken.IndexPropagationQuantize(16, 4),
    "IBQ with entropy": lambda: SeedVoken.IndexPropagationQuantize(16, 4, use_entropy_loss=True),
    "LlamaGen": lambda: LlamaGen.VectorQuantizer(16, 4, 0.25),
    "LlamaGen on the sphere": lambda: LlamaGen.VectorQuantizer(16, 4, 0.25, l2_norm=True, show_usage=True),
    "LlamaGen with entropy": lambda: LlamaGen.VectorQuantizer(16, 4, 0.25, entropy_loss_ratio=0.3),
    "LlamaGen with both": lambda: LlamaGen.VectorQuantizer(16, 4, 0.25, entropy_loss_ratio=0.3, l2_norm=True),
}
