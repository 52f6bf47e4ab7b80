"""What each published algorithm is, in Chinese: one sentence a name, for the table of docs/zh/algorithms.md."""

ABOUT = {
    "grpo": "组相对策略优化。默认值取自 Shao 等 2024“DeepSeekMath”（arXiv 2402.03300）：k3 放在损失中，beta 为 0.04，"
    "先对 token 再对序列取平均。论文没有给出裁剪范围和 epsilon：0.2 取自 PPO（arXiv 1707.06347），1e-6 由 RFT 选定。",
    "dr_grpo": "修正的 GRPO：既不除以标准差，也不除以回答长度。默认值取自 Liu 等 2025（arXiv 2503.20783）：奖励在组内减去均值，"
    "token 之和除以一个固定长度，没有 KL。必须给出 `max_tokens`。",
    "dapo": "解耦裁剪与动态采样策略优化。默认值取自 Yu 等 2025（arXiv 2503.14476）：裁剪 0.2 和 0.28，对全部 token 取平均，"
    "没有 KL，替换没有信号的组，对最后五分之一的长度（20,480 个 token 中的 4,096 个）加以惩罚。",
    "gspo": "组序列策略优化：使用整个序列的比率。默认值取自 Zheng 等 2025（arXiv 2507.18071）：裁剪 3e-4 和 4e-4，没有 KL。",
    "gspo_token": "GSPO-token（arXiv 2507.18071，4.3 节）：比率相同，优势可以逐 token 给出。",
    "gmpo": "几何平均策略优化（GMPO）。默认值取自 Zhao 等 2025（arXiv 2507.20673）：对数比裁剪到 +-0.4，没有 KL。",
    "cispo": "把裁剪后的重要性权重作为梯度的系数（MiniMax-M1，arXiv 2506.13585）；对全部 token 取平均。",
    "sapo": "软自适应策略优化（arXiv 2511.20347）：温度为 1.0 和 1.05。",
    "cpgd": "带策略漂移的裁剪策略梯度（arXiv 2505.12504）：在对数空间裁剪，并加上一个漂移项。",
    "gae": "带价值网络的近端策略优化。裁剪 0.2 和 lambda 0.95 取自 Schulman 等 2017（arXiv 1707.06347）；gamma 为 1，"
    "奖励中的 k1 惩罚为 0.02，与 Ouyang 等 2022（arXiv 2203.02155）相同；优势在批次上归一化。",
    "reinforce": "REINFORCE（Williams 1992）：以回报为优势，没有基线，没有裁剪。",
    "reinforce++": "REINFORCE++（arXiv 2501.03262）：奖励中带 k1 惩罚的回报，在批次上归一化，PPO 裁剪。",
    "reinforce_baseline": "REINFORCE++-baseline（arXiv 2501.03262）：以组均值为基线，在批次上归一化，k2 放在损失中。",
    "rloo": "留一法 REINFORCE（arXiv 2402.14740）：-A log pi 在序列上求和，k1 放在奖励中。",
    "remax": "ReMax（arXiv 2310.10505）：以贪心回答为基线。",
    "opo": "带最优基线的 on-policy 方法（arXiv 2505.23585）：按长度加权的基线，没有 KL，没有熵奖励。",
    "lite_ppo": "Lite PPO（arXiv 2508.08221）：组均值，批次标准差，对全部 token 取平均。",
    "maxrl": "MaxRL（arXiv 2602.02710）：减去均值的奖励再除以组均值。",
    "gdpo": "GDPO（arXiv 2601.05242）：奖励的每个部分分别归一化，再在批次上归一化。",
    "pass_at_k": "Pass@k 训练（arXiv 2508.10751）：GRPO 加上 k 次抽样的解析优势。",
    "best_of_group": "只学习组内最好的回答（arXiv 2503.19595）。",
    "gpg": "组策略梯度（arXiv 2504.02546）：-A log pi，没有裁剪，没有 KL。",
    "dppo": "散度 PPO（arXiv 2602.04879）：用概率变化的掩码代替裁剪。",
    "clip_cov": "Clip-Cov（arXiv 2505.22617）：协方差高的少数 token 不给梯度。",
    "kl_cov": "KL-Cov（arXiv 2505.22617）：协方差最高的 token 保持在原处。",
    "kimi": "Kimi k1.5 的镜像下降（arXiv 2501.12599）：减去均值的奖励和对数比的平方。",
    "decoupled_ppo": "解耦 PPO（arXiv 2110.00641、2505.24298）：以本步开始时为中心裁剪，并按引擎与训练的偏差加权。",
    "process_grpo": "带过程监督的 GRPO（arXiv 2402.03300，4.1.3 节）：对回答内部的步骤给出奖励。",
}
"""By the name of the record."""

