//! What the answers about the agents of many nodes have in common.

use std::mem::take;

use crate::v1::{
    AffinityAnswer, DropsAnswer, FlowsAnswer, GraphAnswer, MissingReplica, ProxiedAnswer,
    SilentNode,
};

/// The agents that were asked, and those without an answer.
#[derive(Clone, Debug, Default)]
pub struct Asked {
    /// Number of nodes that were asked.
    pub asked: u64,
    /// Number of those that answered.
    pub answered: u64,
    /// Nodes that did not answer.
    pub silent: Vec<SilentNode>,
    /// Number of further ones.
    pub more_silent: u64,
    /// Replicas whose agents were not asked.
    pub missing_replicas: Vec<MissingReplica>,
}

macro_rules! answers {
    ($($answer:ident)*) => { $(
        impl From<Asked> for $answer {
            fn from(asked: Asked) -> Self {
                let Asked { asked, answered, silent, more_silent, missing_replicas } = asked;
                Self { asked, answered, silent, more_silent, missing_replicas, ..Self::default() }
            }
        }

        impl From<&mut $answer> for Asked {
            fn from(answer: &mut $answer) -> Self {
                Self {
                    asked: answer.asked,
                    answered: answer.answered,
                    silent: take(&mut answer.silent),
                    more_silent: answer.more_silent,
                    missing_replicas: take(&mut answer.missing_replicas),
                }
            }
        }
    )* };
}

answers!(AffinityAnswer DropsAnswer FlowsAnswer GraphAnswer ProxiedAnswer);
