"""
TD3 written again from the paper (Fujimoto et al. 2018, Algorithm 1) in float64 numpy, gradients by hand.

It shares no code with the package and is slow and plain on purpose: the package has to equal it.
A network is a list of (weight, bias) with ReLU between layers.
"""

import numpy as np


def forward(network, inputs):
    """Output of the network, and the input of every layer for the backward pass."""
    layer_inputs = []
    values = inputs
    for index, (weight, bias) in enumerate(network):
        layer_inputs.append(values)
        values = values @ weight.T + bias
        if index < len(network) - 1:
            values = np.maximum(values, 0.0)
    return values, layer_inputs


def backward(network, layer_inputs, output_gradient):
    """Gradients of the weights and biases, and of the network's input."""
    gradients = [None] * len(network)
    flowing = output_gradient
    for index in reversed(range(len(network))):
        weight, _ = network[index]
        gradients[index] = (flowing.T @ layer_inputs[index], flowing.sum(axis=0))
        flowing = flowing @ weight
        if index > 0:
            flowing = flowing * (layer_inputs[index] > 0)
    return gradients, flowing


class Adam:
    """Kingma and Ba 2015, Algorithm 1."""

    def __init__(self, learning_rate):
        self.learning_rate = learning_rate
        self.steps = 0
        self.moments = {}

    def step(self, network, gradients, name):
        for layer, (values, layer_gradients) in enumerate(zip(network, gradients, strict=True)):
            for kind, (value, gradient) in enumerate(zip(values, layer_gradients, strict=True)):
                first, second = self.moments.get((name, layer, kind), (np.zeros_like(value), np.zeros_like(value)))
                first = 0.9 * first + 0.1 * gradient
                second = 0.999 * second + 0.001 * gradient**2
                self.moments[name, layer, kind] = first, second
                corrected = first / (1 - 0.9**self.steps), second / (1 - 0.999**self.steps)
                value -= self.learning_rate * corrected[0] / (np.sqrt(corrected[1]) + 1e-8)


class PaperTD3:
    """
    :param actor: layers of the actor, whose output goes through tanh
    :param critics: the layers of each critic, which sees (state, action)
    :param max_grad_norm: of the actor's gradient and of all critics' together; not the paper's
    """

    def __init__(self, actor, critics, learning_rates, gamma, tau, noise_std, noise_clip, policy_delay, max_grad_norm=np.inf):
        self.actor = copy(actor)
        self.critics = [copy(critic) for critic in critics]
        self.actor_target = copy(actor)
        self.critic_targets = [copy(critic) for critic in critics]
        self.actor_optimizer, self.critic_optimizer = map(Adam, learning_rates)
        self.max_grad_norm, self.norms = max_grad_norm, []
        self.gamma, self.tau, self.noise_std, self.noise_clip = gamma, tau, noise_std, noise_clip
        self.policy_delay = policy_delay
        self.updates = 0

    def update(self, states, actions, next_states, rewards, terminated, noise):
        """One iteration of the inner loop; returns the critics' loss and the actor's (None when it is not due)."""
        self.updates += 1
        smoothing = np.clip(noise * self.noise_std, -self.noise_clip, self.noise_clip)
        next_actions = np.clip(np.tanh(forward(self.actor_target, next_states)[0]) + smoothing, -1.0, 1.0)
        next_inputs = np.concatenate([next_states, next_actions], axis=1)
        next_values = self.next_values([forward(critic, next_inputs)[0] for critic in self.critic_targets])
        targets = rewards + self.gamma * (1.0 - terminated) * next_values

        critic_loss, gradients = 0.0, []
        inputs = np.concatenate([states, actions], axis=1)
        for critic in self.critics:
            values, layer_inputs = forward(critic, inputs)
            loss, output_gradient = self.loss(values, targets)
            critic_loss += loss
            gradients.append(backward(critic, layer_inputs, output_gradient)[0])
        self.critic_optimizer.steps += 1
        for name, (critic, gradient) in enumerate(zip(self.critics, self.clipped(gradients), strict=True)):
            self.critic_optimizer.step(critic, gradient, name)

        if self.updates % self.policy_delay != 0:
            return critic_loss, None
        return critic_loss, self.update_actor_and_targets(states)

    def clipped(self, networks):
        """Gradients of the networks of one optimizer, scaled down to the largest norm allowed if theirs is above it."""
        norm = sum(np.sum(part**2) for layers in networks for layer in layers for part in layer) ** 0.5
        self.norms.append(norm)
        scale = min(1.0, self.max_grad_norm / (norm + 1e-6))
        return [[tuple(part * scale for part in layer) for layer in layers] for layers in networks]

    def next_values(self, outputs):
        return np.minimum.reduce(outputs)

    def loss(self, values, targets):
        """One critic's share of the loss, and its gradient by the critic's output."""
        return np.mean((values - targets) ** 2), 2.0 * (values - targets) / len(values)

    def ascended(self):
        """The critics whose mean output the actor ascends."""
        return self.critics[:1]

    def update_actor_and_targets(self, states):
        before_tanh, actor_inputs = forward(self.actor, states)
        actions = np.tanh(before_tanh)
        loss, input_gradient = 0.0, 0.0
        for critic in self.ascended():
            values, critic_inputs = forward(critic, np.concatenate([states, actions], axis=1))
            ascend = -np.ones_like(values) / values.size / len(self.ascended())
            loss -= np.mean(values) / len(self.ascended())
            input_gradient = input_gradient + backward(critic, critic_inputs, ascend)[1]
        action_gradient = input_gradient[:, states.shape[1] :] * (1.0 - actions**2)
        gradients, _ = backward(self.actor, actor_inputs, action_gradient)
        self.actor_optimizer.steps += 1
        self.actor_optimizer.step(self.actor, self.clipped([gradients])[0], "actor")

        for target, source in zip([*self.critic_targets, self.actor_target], [*self.critics, self.actor], strict=True):
            for target_layer, source_layer in zip(target, source, strict=True):
                for target_value, source_value in zip(target_layer, source_layer, strict=True):
                    target_value[...] = self.tau * source_value + (1.0 - self.tau) * target_value
        return loss


def copy(network):
    return [(weight.copy(), bias.copy()) for weight, bias in network]
