//! The text of typical changes, word by word.

use expect_test::{Expect, expect};
use kplane_model::{Family, TrafficPolicy};

use super::sample::{self, Shape, plain, plan};
use super::*;

/// Compares the text that a change of a ServicePort from `before` to `after` writes.
fn check(family: Family, before: &Shape, after: Option<&Shape>, expected: &Expect) {
    let node = node_plan(family, &pods());
    let key = sample::key(0, family);
    let services =
        |shape: Option<&Shape>| vec![(key.clone(), shape.map(|shape| plan(0, family, shape)))];
    let mut held = HeldChain::new(RuleSettings::new(family));
    let other = vec![(sample::key(3, family), Some(plan(3, family, &plain())))];
    held.apply(change(family, &node, &other, true));
    held.apply(change(family, &node, &services(Some(before)), false));
    let staged = held.apply(change(family, &node, &services(after), false));
    let text: String = staged.steps.iter().flat_map(|step| parts(step, Limits::NFT)).collect();
    expected.assert_eq(&text);
}

fn without_endpoints() -> Shape {
    Shape {
        endpoints: Vec::new(),
        ..plain()
    }
}

fn external() -> Shape {
    Shape {
        load_balancer: true,
        node_port: true,
        policy: TrafficPolicy::Local,
        affinity: true,
        ranges: true,
        health: true,
        ..plain()
    }
}

#[test]
fn an_empty_node() {
    let node = node_plan(Family::V4, &pods());
    let mut held = HeldChain::new(RuleSettings::new(Family::V4));
    let staged = held.apply(change(Family::V4, &node, &Plans::new(), true));
    let text: String = staged.steps.iter().flat_map(|step| parts(step, Limits::NFT)).collect();
    expect![[r#"
        *filter
        :KUBE-NODEPORTS - [0:0]
        :KUBE-EXTERNAL-SERVICES - [0:0]
        :KUBE-FIREWALL - [0:0]
        :KUBE-FORWARD - [0:0]
        :KUBE-PROXY-CANARY - [0:0]
        :KUBE-PROXY-FIREWALL - [0:0]
        :KUBE-SERVICES - [0:0]
        -A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m comment --comment "block incoming localnet connections" -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP
        -A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
        -A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark 0x4000/0x4000 -j ACCEPT
        -A KUBE-FORWARD -m comment --comment "kubernetes forwarding conntrack rule" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
        -I INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES
        -I FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES
        -I INPUT -m comment --comment "kubernetes health check service ports" -j KUBE-NODEPORTS
        -I FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
        -I OUTPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
        -I FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
        -I INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
        -I OUTPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
        -I FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
        -I INPUT -j KUBE-FIREWALL
        -I OUTPUT -j KUBE-FIREWALL
        COMMIT
        *nat
        :KUBE-MARK-MASQ - [0:0]
        :KUBE-NODEPORTS - [0:0]
        :KUBE-POSTROUTING - [0:0]
        :KUBE-PROXY-CANARY - [0:0]
        :KUBE-SERVICES - [0:0]
        -A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
        -A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
        -A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
        -A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
        -A KUBE-SERVICES -m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
        -I OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
        -I PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
        -I POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
        COMMIT
        *mangle
        :KUBE-PROXY-CANARY - [0:0]
        COMMIT
    "#]].assert_eq(&text);
}

#[test]
fn a_service_gets_its_first_endpoints() {
    check(
        Family::V4,
        &without_endpoints(),
        Some(&plain()),
        &expect![[r#"
        *nat
        :KUBE-SEP-DY3S6SPCRNYQSSAS - [0:0]
        :KUBE-SEP-P55ERJ7YCD5BE2C2 - [0:0]
        :KUBE-SVC-XUFRRXWRUQKMCLZJ - [0:0]
        :KUBE-SERVICES - [0:0]
        -A KUBE-SEP-DY3S6SPCRNYQSSAS -s 10.244.1.2/32 -m comment --comment "shop/svc-0:http" -j KUBE-MARK-MASQ
        -A KUBE-SEP-DY3S6SPCRNYQSSAS -p tcp -m comment --comment "shop/svc-0:http" -m tcp -j DNAT --to-destination 10.244.1.2:8080
        -A KUBE-SEP-P55ERJ7YCD5BE2C2 -s 10.244.1.1/32 -m comment --comment "shop/svc-0:http" -j KUBE-MARK-MASQ
        -A KUBE-SEP-P55ERJ7YCD5BE2C2 -p tcp -m comment --comment "shop/svc-0:http" -m tcp -j DNAT --to-destination 10.244.1.1:8080
        -A KUBE-SVC-XUFRRXWRUQKMCLZJ ! -s 10.244.0.0/16 -d 172.20.0.0/32 -p tcp -m comment --comment "shop/svc-0:http cluster IP" -m tcp --dport 80 -j KUBE-MARK-MASQ
        -A KUBE-SVC-XUFRRXWRUQKMCLZJ -m comment --comment "shop/svc-0:http -> 10.244.1.1:8080" -m statistic --mode random --probability 0.50000000000 -j KUBE-SEP-P55ERJ7YCD5BE2C2
        -A KUBE-SVC-XUFRRXWRUQKMCLZJ -m comment --comment "shop/svc-0:http -> 10.244.1.2:8080" -j KUBE-SEP-DY3S6SPCRNYQSSAS
        -A KUBE-SERVICES -d 10.96.0.5/32 -p tcp -m comment --comment "shop/svc-3:http cluster IP" -m tcp --dport 83 -j KUBE-SVC-EDZIWTREQGWZ4OJ2
        -A KUBE-SERVICES -d 172.20.0.0/32 -p tcp -m comment --comment "shop/svc-0:http cluster IP" -m tcp --dport 80 -j KUBE-SVC-XUFRRXWRUQKMCLZJ
        -A KUBE-SERVICES -m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
        COMMIT
        *filter
        :KUBE-SERVICES - [0:0]
        COMMIT
    "#]],
    );
}

#[test]
fn a_service_loses_its_last_endpoint() {
    check(
        Family::V4,
        &plain(),
        Some(&without_endpoints()),
        &expect![[r#"
        *filter
        :KUBE-SERVICES - [0:0]
        -A KUBE-SERVICES -d 172.20.0.0/32 -p tcp -m comment --comment "shop/svc-0:http has no endpoints" -m tcp --dport 80 -j REJECT --reject-with icmp-port-unreachable
        COMMIT
        *nat
        :KUBE-SERVICES - [0:0]
        :KUBE-SVC-XUFRRXWRUQKMCLZJ - [0:0]
        :KUBE-SEP-DY3S6SPCRNYQSSAS - [0:0]
        :KUBE-SEP-P55ERJ7YCD5BE2C2 - [0:0]
        -A KUBE-SERVICES -d 10.96.0.5/32 -p tcp -m comment --comment "shop/svc-3:http cluster IP" -m tcp --dport 83 -j KUBE-SVC-EDZIWTREQGWZ4OJ2
        -A KUBE-SERVICES -m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
        -X KUBE-SVC-XUFRRXWRUQKMCLZJ
        -X KUBE-SEP-DY3S6SPCRNYQSSAS
        -X KUBE-SEP-P55ERJ7YCD5BE2C2
        COMMIT
    "#]],
    );
}

#[test]
fn a_service_gets_another_endpoint() {
    let mut more = plain();
    more.endpoints.push((3, false));
    check(
        Family::V4,
        &plain(),
        Some(&more),
        &expect![[r#"
        *nat
        :KUBE-SEP-TQNWWWDCZZOC2KUJ - [0:0]
        :KUBE-SVC-XUFRRXWRUQKMCLZJ - [0:0]
        -A KUBE-SEP-TQNWWWDCZZOC2KUJ -s 10.244.1.3/32 -m comment --comment "shop/svc-0:http" -j KUBE-MARK-MASQ
        -A KUBE-SEP-TQNWWWDCZZOC2KUJ -p tcp -m comment --comment "shop/svc-0:http" -m tcp -j DNAT --to-destination 10.244.1.3:8080
        -A KUBE-SVC-XUFRRXWRUQKMCLZJ ! -s 10.244.0.0/16 -d 172.20.0.0/32 -p tcp -m comment --comment "shop/svc-0:http cluster IP" -m tcp --dport 80 -j KUBE-MARK-MASQ
        -A KUBE-SVC-XUFRRXWRUQKMCLZJ -m comment --comment "shop/svc-0:http -> 10.244.1.1:8080" -m statistic --mode random --probability 0.33333333349 -j KUBE-SEP-P55ERJ7YCD5BE2C2
        -A KUBE-SVC-XUFRRXWRUQKMCLZJ -m comment --comment "shop/svc-0:http -> 10.244.1.2:8080" -m statistic --mode random --probability 0.50000000000 -j KUBE-SEP-DY3S6SPCRNYQSSAS
        -A KUBE-SVC-XUFRRXWRUQKMCLZJ -m comment --comment "shop/svc-0:http -> 10.244.1.3:8080" -j KUBE-SEP-TQNWWWDCZZOC2KUJ
        COMMIT
    "#]],
    );
}

#[test]
fn a_service_becomes_everything() {
    check(
        Family::V6,
        &plain(),
        Some(&external()),
        &expect![[r#"
        *filter
        :KUBE-NODEPORTS - [0:0]
        :KUBE-PROXY-FIREWALL - [0:0]
        -A KUBE-NODEPORTS -p tcp -m comment --comment "shop/svc-0:http health check node port" -m tcp --dport 32000 -j ACCEPT
        -A KUBE-PROXY-FIREWALL -d fd00::c633:6400/128 -p tcp -m comment --comment "shop/svc-0:http traffic not accepted by KUBE-FW-XUFRRXWRUQKMCLZJ" -m tcp --dport 80 -j DROP
        COMMIT
        *nat
        :KUBE-SEP-AFV7UVLBY4KMQRU2 - [0:0]
        :KUBE-SEP-TBI3ULMJ7G7S5QDS - [0:0]
        :KUBE-SVC-XUFRRXWRUQKMCLZJ - [0:0]
        :KUBE-SVL-XUFRRXWRUQKMCLZJ - [0:0]
        :KUBE-EXT-XUFRRXWRUQKMCLZJ - [0:0]
        :KUBE-FW-XUFRRXWRUQKMCLZJ - [0:0]
        :KUBE-NODEPORTS - [0:0]
        :KUBE-SERVICES - [0:0]
        -A KUBE-SEP-AFV7UVLBY4KMQRU2 -s fd00::af4:101/128 -m comment --comment "shop/svc-0:http" -j KUBE-MARK-MASQ
        -A KUBE-SEP-AFV7UVLBY4KMQRU2 -p tcp -m comment --comment "shop/svc-0:http" -m recent --set --name KUBE-SEP-AFV7UVLBY4KMQRU2 --mask ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff --rsource -m tcp -j DNAT --to-destination [fd00::af4:101]:8080
        -A KUBE-SEP-TBI3ULMJ7G7S5QDS -s fd00::af4:102/128 -m comment --comment "shop/svc-0:http" -j KUBE-MARK-MASQ
        -A KUBE-SEP-TBI3ULMJ7G7S5QDS -p tcp -m comment --comment "shop/svc-0:http" -m recent --set --name KUBE-SEP-TBI3ULMJ7G7S5QDS --mask ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff --rsource -m tcp -j DNAT --to-destination [fd00::af4:102]:8080
        -A KUBE-SVC-XUFRRXWRUQKMCLZJ ! -s fd24::/16 -d fd00::ac14:0/128 -p tcp -m comment --comment "shop/svc-0:http cluster IP" -m tcp --dport 80 -j KUBE-MARK-MASQ
        -A KUBE-SVC-XUFRRXWRUQKMCLZJ -m comment --comment "shop/svc-0:http -> [fd00::af4:101]:8080" -m recent --rcheck --seconds 600 --reap --name KUBE-SEP-AFV7UVLBY4KMQRU2 --mask ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff --rsource -j KUBE-SEP-AFV7UVLBY4KMQRU2
        -A KUBE-SVC-XUFRRXWRUQKMCLZJ -m comment --comment "shop/svc-0:http -> [fd00::af4:102]:8080" -m recent --rcheck --seconds 600 --reap --name KUBE-SEP-TBI3ULMJ7G7S5QDS --mask ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff --rsource -j KUBE-SEP-TBI3ULMJ7G7S5QDS
        -A KUBE-SVC-XUFRRXWRUQKMCLZJ -m comment --comment "shop/svc-0:http -> [fd00::af4:101]:8080" -m statistic --mode random --probability 0.50000000000 -j KUBE-SEP-AFV7UVLBY4KMQRU2
        -A KUBE-SVC-XUFRRXWRUQKMCLZJ -m comment --comment "shop/svc-0:http -> [fd00::af4:102]:8080" -j KUBE-SEP-TBI3ULMJ7G7S5QDS
        -A KUBE-SVL-XUFRRXWRUQKMCLZJ -m comment --comment "shop/svc-0:http -> [fd00::af4:102]:8080" -m recent --rcheck --seconds 600 --reap --name KUBE-SEP-TBI3ULMJ7G7S5QDS --mask ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff --rsource -j KUBE-SEP-TBI3ULMJ7G7S5QDS
        -A KUBE-SVL-XUFRRXWRUQKMCLZJ -m comment --comment "shop/svc-0:http -> [fd00::af4:102]:8080" -j KUBE-SEP-TBI3ULMJ7G7S5QDS
        -A KUBE-EXT-XUFRRXWRUQKMCLZJ -s fd24::/16 -m comment --comment "pod traffic for shop/svc-0:http external destinations" -j KUBE-SVC-XUFRRXWRUQKMCLZJ
        -A KUBE-EXT-XUFRRXWRUQKMCLZJ -m comment --comment "masquerade LOCAL traffic for shop/svc-0:http external destinations" -m addrtype --src-type LOCAL -j KUBE-MARK-MASQ
        -A KUBE-EXT-XUFRRXWRUQKMCLZJ -m comment --comment "route LOCAL traffic for shop/svc-0:http external destinations" -m addrtype --src-type LOCAL -j KUBE-SVC-XUFRRXWRUQKMCLZJ
        -A KUBE-EXT-XUFRRXWRUQKMCLZJ -j KUBE-SVL-XUFRRXWRUQKMCLZJ
        -A KUBE-FW-XUFRRXWRUQKMCLZJ -s 2001:db8::/32 -m comment --comment "shop/svc-0:http loadbalancer IP" -j KUBE-EXT-XUFRRXWRUQKMCLZJ
        -A KUBE-FW-XUFRRXWRUQKMCLZJ -m comment --comment "other traffic to shop/svc-0:http will be dropped by KUBE-PROXY-FIREWALL"
        -A KUBE-NODEPORTS -p tcp -m comment --comment "shop/svc-0:http" -m tcp --dport 30000 -j KUBE-EXT-XUFRRXWRUQKMCLZJ
        -A KUBE-SERVICES -d fd00::a60:5/128 -p tcp -m comment --comment "shop/svc-3:http cluster IP" -m tcp --dport 83 -j KUBE-SVC-EDZIWTREQGWZ4OJ2
        -A KUBE-SERVICES -d fd00::ac14:0/128 -p tcp -m comment --comment "shop/svc-0:http cluster IP" -m tcp --dport 80 -j KUBE-SVC-XUFRRXWRUQKMCLZJ
        -A KUBE-SERVICES -d fd00::c633:6400/128 -p tcp -m comment --comment "shop/svc-0:http loadbalancer IP" -m tcp --dport 80 -j KUBE-FW-XUFRRXWRUQKMCLZJ
        -A KUBE-SERVICES ! -d ::1/128 -m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
        COMMIT
    "#]],
    );
}

#[test]
fn a_service_goes() {
    check(
        Family::V4,
        &external(),
        None,
        &expect![[r#"
        *nat
        :KUBE-NODEPORTS - [0:0]
        :KUBE-SERVICES - [0:0]
        :KUBE-FW-XUFRRXWRUQKMCLZJ - [0:0]
        :KUBE-EXT-XUFRRXWRUQKMCLZJ - [0:0]
        :KUBE-SVL-XUFRRXWRUQKMCLZJ - [0:0]
        :KUBE-SVC-XUFRRXWRUQKMCLZJ - [0:0]
        :KUBE-SEP-DY3S6SPCRNYQSSAS - [0:0]
        :KUBE-SEP-P55ERJ7YCD5BE2C2 - [0:0]
        -A KUBE-SERVICES -d 10.96.0.5/32 -p tcp -m comment --comment "shop/svc-3:http cluster IP" -m tcp --dport 83 -j KUBE-SVC-EDZIWTREQGWZ4OJ2
        -A KUBE-SERVICES -m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
        -X KUBE-FW-XUFRRXWRUQKMCLZJ
        -X KUBE-EXT-XUFRRXWRUQKMCLZJ
        -X KUBE-SVL-XUFRRXWRUQKMCLZJ
        -X KUBE-SVC-XUFRRXWRUQKMCLZJ
        -X KUBE-SEP-DY3S6SPCRNYQSSAS
        -X KUBE-SEP-P55ERJ7YCD5BE2C2
        COMMIT
        *filter
        :KUBE-NODEPORTS - [0:0]
        :KUBE-PROXY-FIREWALL - [0:0]
        COMMIT
    "#]],
    );
}

#[test]
fn a_tree_is_divided_where_places_differ() {
    let node = node_plan(Family::V4, &pods());
    let services: Plans = (0..60)
        .map(|n| {
            (
                sample::key(n, Family::V4),
                Some(plan(n, Family::V4, &plain())),
            )
        })
        .collect();
    let mut held = HeldChain::new(RuleSettings::new(Family::V4));
    held.apply(change(Family::V4, &node, &services, true));
    let chains = &held.kernel.tables[&TableName::Nat];
    let of_tree = |name: &str| name == "KUBE-SERVICES" || name.starts_with("KUBE-SVC-D-");
    let mut text = String::new();
    for (name, rules) in chains.iter().filter(|(name, _)| of_tree(name)) {
        let is_jump = |rule: &&String| rule.contains("-j KUBE-SVC-D-");
        let (jumps, others): (Vec<_>, Vec<_>) = rules.iter().partition(is_jump);
        let frontends = others.iter().filter(|rule| rule.contains("-j KUBE-SVC-")).count();
        for rule in jumps {
            text.push_str(&format!("{rule}\n"));
        }
        text.push_str(&format!("{name}: {frontends} places\n"));
    }
    expect![[r#"
        -A KUBE-SERVICES -d 0.0.0.0/4 -j KUBE-SVC-D-S0-4
        -A KUBE-SERVICES -d 128.0.0.0/1 -j KUBE-SVC-D-S8-1
        KUBE-SERVICES: 0 places
        -A KUBE-SVC-D-S0-4 -d 10.96.0.0/28 -j KUBE-SVC-D-S0A60000-28
        -A KUBE-SVC-D-S0-4 -d 10.96.0.16/28 -j KUBE-SVC-D-S0A60001-28
        -A KUBE-SVC-D-S0-4 -d 10.96.0.32/28 -j KUBE-SVC-D-S0A60002-28
        -A KUBE-SVC-D-S0-4 -d 10.96.0.48/28 -j KUBE-SVC-D-S0A60003-28
        -A KUBE-SVC-D-S0-4 -d 10.96.0.64/28 -j KUBE-SVC-D-S0A60004-28
        -A KUBE-SVC-D-S0-4 -d 10.96.0.80/28 -j KUBE-SVC-D-S0A60005-28
        KUBE-SVC-D-S0-4: 0 places
        KUBE-SVC-D-S0A60000-28: 11 places
        KUBE-SVC-D-S0A60001-28: 8 places
        KUBE-SVC-D-S0A60002-28: 8 places
        KUBE-SVC-D-S0A60003-28: 9 places
        KUBE-SVC-D-S0A60004-28: 8 places
        KUBE-SVC-D-S0A60005-28: 11 places
        KUBE-SVC-D-S8-1: 5 places
    "#]]
    .assert_eq(&text);
}
