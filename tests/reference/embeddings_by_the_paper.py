"""
Quantile critics with state-action embeddings (SALE, Fujimoto et al. 2023) written again in float64, gradients by hand.

It shares no code with the package and is slow and plain on purpose: the package has to equal it. Unlike in the paper, all that
follows moves by tau instead of being copied every 250 updates, and the encoder learns at the critics' rate.
"""

import numpy as np

from tests.reference.quantiles_by_the_paper import PaperQuantileTD3
from tests.reference.td3_by_the_paper import backward, copy, forward


def normalized(values):
    """Each row divided by the mean of its absolute values."""
    return np.array([row / max(np.mean(np.abs(row)), 1e-8) for row in values])


def normalized_backward(values, gradient):
    rows = []
    for row, slopes in zip(values, gradient, strict=True):
        mean, n = np.mean(np.abs(row)), len(row)
        rows.append(slopes / mean - np.sign(row) * np.dot(slopes, row) / (n * mean**2))
    return np.array(rows)


def elu_forward(network, inputs):
    """As ``forward`` with ELU between layers; also what came before each of them."""
    seen, values = [], inputs
    for index, (weight, bias) in enumerate(network):
        before = values @ weight.T + bias
        seen.append((values, before))
        values = np.where(before > 0, before, np.exp(np.minimum(before, 0)) - 1) if index < len(network) - 1 else before
    return values, seen


def elu_backward(network, seen, flowing):
    gradients = [None] * len(network)
    for index in reversed(range(len(network))):
        inputs, before = seen[index]
        if index < len(network) - 1:
            flowing = flowing * np.where(before > 0, 1.0, np.exp(np.minimum(before, 0)))
        gradients[index] = (flowing.T @ inputs, flowing.sum(axis=0))
        flowing = flowing @ network[index][0]
    return gradients, flowing


class Headed:
    """A network whose first numbers come from a normalised linear map."""

    def __init__(self, layers):
        self.head, self.rest = copy(layers[:1]), copy(layers[1:])

    def layers(self):
        return [*self.head, *self.rest]

    def forward(self, mapped, others):
        before, self.head_seen = elu_forward(self.head, mapped)
        self.before = before
        values, self.rest_seen = forward(self.rest, np.concatenate([normalized(before), *others], axis=1))
        return values

    def backward(self, gradient):
        """Gradients of all layers, of what is mapped, and of the others together."""
        rest, flowing = backward(self.rest, self.rest_seen, gradient)
        width = self.before.shape[1]
        head, mapped = elu_backward(self.head, self.head_seen, normalized_backward(self.before, flowing[:, :width]))
        return [*head, *rest], mapped, flowing[:, width:]


class PaperEncoder:
    def __init__(self, state, transition):
        self.state, self.transition = copy(state), copy(transition)

    def layers(self):
        return [*self.state, *self.transition]

    def embed(self, states, actions):
        self.before, self.state_seen = elu_forward(self.state, states)
        zs = normalized(self.before)
        zsa, self.transition_seen = elu_forward(self.transition, np.concatenate([zs, actions], axis=1))
        return zs, zsa

    def action_gradient(self, gradient, dim):
        return elu_backward(self.transition, self.transition_seen, gradient)[1][:, dim:]

    def loss(self, states, actions, next_states):
        """And the gradients of all layers."""
        wanted = normalized(elu_forward(self.state, next_states)[0])
        zs, zsa = self.embed(states, actions)
        gradient = 2 * (zsa - wanted) / zsa.size
        transition, flowing = elu_backward(self.transition, self.transition_seen, gradient)
        state, _ = elu_backward(self.state, self.state_seen, normalized_backward(self.before, flowing[:, : zs.shape[1]]))
        return np.mean((zsa - wanted) ** 2), [*state, *transition]


class PaperEmbeddedTD3(PaperQuantileTD3):
    """
    :param state: layers of the encoder of states
    :param transition: layers of the encoder of their embeddings with actions
    """

    def __init__(self, actor, critics, state, transition, **kwargs):
        super().__init__(actor, critics, **kwargs)
        self.actor, self.actor_target = Headed(actor), Headed(actor)
        self.critics = [Headed(critic) for critic in critics]
        self.critic_targets = [Headed(critic) for critic in critics]
        self.encoder, self.embedding, self.embedding_target = (PaperEncoder(state, transition) for _ in range(3))

    def update(self, states, actions, next_states, rewards, terminated, noise):
        """As without embeddings; returns the encoder's loss too."""
        self.updates += 1
        target = self.embedding_target
        zs = target.embed(next_states, actions)[0]
        smoothing = np.clip(noise * self.noise_std, -self.noise_clip, self.noise_clip)
        next_actions = np.clip(np.tanh(self.actor_target.forward(next_states, [zs])) + smoothing, -1.0, 1.0)
        embeddings = target.embed(next_states, next_actions)
        inputs = np.concatenate([next_states, next_actions], axis=1)
        next_values = self.next_values([critic.forward(inputs, embeddings) for critic in self.critic_targets])
        targets = rewards + self.gamma * (1.0 - terminated) * next_values

        critic_loss, gradients = 0.0, []
        embeddings, inputs = self.embedding.embed(states, actions), np.concatenate([states, actions], axis=1)
        for critic in self.critics:
            loss, slopes = self.loss(critic.forward(inputs, embeddings), targets)
            critic_loss += loss
            gradients.append(critic.backward(slopes)[0])
        encoder_loss, encoder_gradients = self.encoder.loss(states, actions, next_states)
        self.critic_optimizer.steps += 1
        for name, (network, gradient) in enumerate(
            zip([*self.critics, self.encoder], self.clipped([*gradients, encoder_gradients]), strict=True)
        ):
            self.critic_optimizer.step(network.layers(), gradient, name)
        actor_loss = self.update_actor_and_targets(states) if self.updates % self.policy_delay == 0 else None
        return critic_loss, actor_loss, encoder_loss

    def update_actor_and_targets(self, states):
        zs = self.embedding.embed(states, np.zeros((len(states), 1)))[0]
        actions = np.tanh(self.actor.forward(states, [zs]))
        embeddings, inputs = self.embedding.embed(states, actions), np.concatenate([states, actions], axis=1)
        loss, action_gradient = 0.0, 0.0
        for critic in self.critics:
            values = critic.forward(inputs, embeddings)
            loss -= np.mean(values) / len(self.critics)
            _, mapped, others = critic.backward(-np.ones_like(values) / values.size / len(self.critics))
            through_embedding = self.embedding.action_gradient(others[:, zs.shape[1] :], zs.shape[1])
            action_gradient = action_gradient + mapped[:, states.shape[1] :] + through_embedding
        gradients, _, _ = self.actor.backward(action_gradient * (1.0 - actions**2))
        self.actor_optimizer.steps += 1
        self.actor_optimizer.step(self.actor.layers(), self.clipped([gradients])[0], "actor")
        for follower, followed in (
            *zip(self.critic_targets, self.critics, strict=True),
            (self.actor_target, self.actor),
            (self.embedding_target, self.embedding),  # before what it follows moves itself
            (self.embedding, self.encoder),
        ):
            for pair in zip(follower.layers(), followed.layers(), strict=True):
                for slow, fast in zip(*pair, strict=True):
                    slow[...] = self.tau * fast + (1.0 - self.tau) * slow
        return loss
