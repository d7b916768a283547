"""Four environments in processes, normalized observations, evaluation during training; model and statistics saved, loaded."""

import torch
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import SubprocVecEnv, VecNormalize

from sb3_td3x import TD3X, load_vecnormalize


def main() -> None:
    torch.set_num_threads(1)  # more are much slower beside other programs

    env = VecNormalize(make_vec_env("Pendulum-v1", 4, seed=0, vec_env_cls=SubprocVecEnv), norm_reward=False)
    eval_env = VecNormalize(make_vec_env("Pendulum-v1", seed=1), training=False, norm_reward=False)
    evaluation = EvalCallback(eval_env, eval_freq=500, n_eval_episodes=5)
    # As many updates as environment steps: without -1, four environments mean a quarter of the updates
    model = TD3X("MlpPolicy", env, gradient_steps=-1, policy_kwargs={"net_arch": [128, 128]}, seed=0)
    model.learn(10_000, callback=evaluation)
    model.save("pendulum_normalized")
    env.save("pendulum_normalized_vecnormalize.pkl")
    env.close()

    # The statistics belong to the model
    env = load_vecnormalize("pendulum_normalized_vecnormalize.pkl", make_vec_env("Pendulum-v1", seed=2))
    env.training = env.norm_reward = False
    model = TD3X.load("pendulum_normalized", env=env)
    print("mean return of the loaded model: {:.0f} +- {:.0f}".format(*evaluate_policy(model, env)))


if __name__ == "__main__":  # processes need it
    main()
