//! The agent's own record: its latest transactions with the kernel.

use std::collections::VecDeque;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::report::Sync;

/// Maximum number of transactions that are kept: some 60 KiB.
const KEPT: usize = 256;
/// Maximum number of Services of a transaction that are named.
pub(crate) const NAMED: usize = 4;

/// One attempt to bring a change into the kernel.
#[derive(Clone, Debug)]
pub(crate) struct Transaction {
    /// Its revision, its times and its size.
    pub(crate) sync: Sync,
    /// Number of ServicePorts that it touched, and a few of their Services.
    pub(crate) touched: usize,
    pub(crate) services: Vec<String>,
    /// Whether the kernel holds everything now.
    pub(crate) complete: bool,
    /// The problem of a family that failed; empty = none did.
    pub(crate) error: String,
}

/// The latest transactions, oldest first.
#[derive(Debug, Default)]
pub struct Transactions(Mutex<VecDeque<Transaction>>);

impl Transactions {
    /// Adds a transaction. The kernel has acknowledged it already.
    pub(crate) fn add(&self, transaction: Transaction) {
        let mut kept = self.0.lock();
        if kept.len() == KEPT {
            kept.pop_front();
        }
        kept.push_back(transaction);
    }

    /// Returns the page about all transactions, newest first.
    pub(crate) fn page(&self) -> Value {
        // The engine waits for the lock, so nothing is printed under it.
        let kept: Vec<Transaction> = {
            let kept = self.0.lock();
            kept.iter().rev().cloned().collect()
        };
        let transactions: Vec<Value> = kept.iter().map(show).collect();
        json!({ "transactions": transactions, "kept": KEPT })
    }
}

fn show(transaction: &Transaction) -> Value {
    let us = |duration: Duration| u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
    let sync = &transaction.sync;
    let result = match (transaction.complete, transaction.error.is_empty()) {
        (_, false) => "Failed",
        (true, true) => "Applied",
        (false, true) => "AppliedInPart",
    };
    json!({
        "revision": sync.revision,
        "finishedAtMilliseconds": sync.finished_at_ms,
        "result": result,
        "error": Some(&transaction.error).filter(|error| !error.is_empty()),
        "servicePorts": transaction.touched,
        "services": transaction.services,
        "operations": sync.operations,
        "bytes": sync.bytes,
        "totalMicroseconds": us(sync.total),
        "planMicroseconds": us(sync.plan),
        "encodeMicroseconds": us(sync.encode),
        "kernelMicroseconds": us(sync.kernel),
        "endToEndMilliseconds": Some(sync.end_to_end_ms).filter(|ms| *ms > 0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_transactions_are_shown_newest_first_and_no_more_than_the_limit() {
        let transactions = Transactions::default();
        for revision in 1..=300 {
            let sync = Sync {
                revision,
                ..Sync::default()
            };
            transactions.add(Transaction {
                sync,
                touched: 1,
                services: vec!["shop/web".to_owned()],
                complete: revision != 300,
                error: String::new(),
            });
        }
        let page = transactions.page();
        let all = page["transactions"].as_array().unwrap();
        assert_eq!(all.len(), KEPT);
        assert_eq!(all[0]["revision"], 300);
        assert_eq!(all[0]["result"], "AppliedInPart");
        assert_eq!(all[1]["result"], "Applied");
        assert_eq!(all[255]["revision"], 45);
        assert!(page.to_string().len() < 128 << 10);
    }
}
