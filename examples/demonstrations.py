"""Fill the replay buffer with demonstrations of a trained agent, and let another one learn from them before its first step."""

import numpy as np
import torch
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

from sb3_td3x import TD3X

steps = 4_000  # of the teacher's training, and of the demonstrations
torch.set_num_threads(1)  # more are much slower beside other programs
settings = {"learning_rate": 2e-3, "batch_size": 128, "gamma": 0.95, "tau": 0.02, "n_quantiles": 1, "action_noise": 0.3,
            "policy_kwargs": {"net_arch": [64, 64]}, "seed": 0}  # fmt: skip
env = make_vec_env("Pendulum-v1", seed=0)
teacher = TD3X("MlpPolicy", env, learning_starts=steps // 8, **settings)
teacher.learn(steps)

student = TD3X("MlpPolicy", env, learning_starts=0, **settings)
noise = np.random.default_rng(0)
observations = env.reset()
for _ in range(steps):
    actions, _ = teacher.predict(observations, deterministic=True)
    # Noise shows the critics what other actions lead to. Replay buffers hold actions in [-1, 1]
    scaled = np.clip(student.policy.scale_action(actions) + noise.normal(0, 0.5, actions.shape), -1, 1)
    next_observations, rewards, dones, infos = env.step(student.policy.unscale_action(scaled))
    ends = [info.get("terminal_observation", observation) for info, observation in zip(infos, next_observations, strict=True)]
    student.replay_buffer.add(observations, np.array(ends), scaled, rewards, dones, infos)
    observations = next_observations

student.train(gradient_steps=steps, batch_size=128)  # from the demonstrations alone
student.learn(steps // 4)  # and with a quarter of the teacher's steps of its own
student.save("student")
for name, model in (("teacher", teacher), ("student", student)):
    mean, std = evaluate_policy(model, env, n_eval_episodes=10)
    print(f"{name}: return {mean:.0f} ± {std:.0f}")
